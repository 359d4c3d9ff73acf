"""What the web server loads. Loading schedules once, so that connections are open when the server forks."""

from __future__ import annotations

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application

wsgi = get_wsgi_application()
asgi = get_asgi_application()


def schedule_once() -> None:
    from django.db import connections

    from tests.beside.web.pages import place

    place()
    connections.close_all()  # no server may fork with an open connection to the database; Redis is up to the library


schedule_once()
