"""procrastinate with its own pool of connections, as outside Django: jobs are not part of Django's transaction."""

from __future__ import annotations

from django.conf import settings
from procrastinate import App, SyncPsycopgConnector

from benchmarks.rivals.procrastinate import Adapter as InDjango
from benchmarks.rivals.procrastinate import note

DATABASE = settings.DATABASES["default"]
KEYS = {"host": "HOST", "port": "PORT", "user": "USER", "dbname": "NAME"}
pooled = App(connector=SyncPsycopgConnector(kwargs={key: DATABASE[name] for key, name in KEYS.items()}))


class Adapter(InDjango):
    title = "procrastinate, own pool"
    on_commit = True
    settings = (("`SyncPsycopgConnector`", "howto/basics/connector.html"),)
    app = pooled
    tasks = {"note": pooled.task(name="note")(note)}

    def set_up(self) -> None:
        pooled.open()
