"""procrastinate with its own pool of connections, as outside Django: jobs are not part of Django's transaction."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from procrastinate import App, SyncPsycopgConnector

from benchmarks.rivals.base import Setting
from benchmarks.rivals.procrastinate import DOCS
from benchmarks.rivals.procrastinate import Adapter as InDjango
from benchmarks.shop import jobs

DATABASE = settings.DATABASES["default"]
KEYS = {"host": "HOST", "port": "PORT", "user": "USER", "dbname": "NAME"}
pooled = App(connector=SyncPsycopgConnector(kwargs={key: DATABASE[name] for key, name in KEYS.items()}))


@pooled.task(name="note")
async def note(pk: int, due: float) -> None:
    jobs.record(due)


class Adapter(InDjango):
    title = "procrastinate, own pool"
    on_commit = True
    settings = (Setting("`SyncPsycopgConnector`", DOCS + "howto/basics/connector.html"),)

    def set_up(self) -> None:
        pooled.open()

    def schedule(self, job: str, pk: int, at: float) -> Any:
        return note.configure(schedule_at=datetime.fromtimestamp(at, UTC)).defer(pk=pk, due=at)

    def cancel(self, handle: Any) -> None:
        assert pooled.job_manager.cancel_job_by_id(handle)
