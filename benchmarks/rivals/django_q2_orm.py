"""django-q2 with its ORM broker: tasks in the database, too."""

from __future__ import annotations

from benchmarks.rivals.django_q2 import Adapter as WithRedis


class Adapter(WithRedis):
    title = "django-q2, jobs in the database"
    settings = (("the ORM broker; otherwise as django-q2", "brokers.html#django-orm"),)
