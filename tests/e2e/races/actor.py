"""A process of a race: runs the commands that it reads as lines of JSON, and answers each. See `stage.Actor`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import django


def main() -> None:
    django.setup()
    operations = _operations()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": operations[asked.pop("operation")](**asked)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        _say(answer)


def _operations() -> Mapping[str, Callable[..., Any]]:
    from django.db import connections

    from tests.e2e.races import paying, verbs

    return {
        "begin": _begin,
        "end": connections.close_all,  # other tests count the connections to the database
        "pay": paying.pay,
        "schedule": verbs.schedule,
        "anything": verbs.anything,
    }


def _begin(prefix: str) -> None:
    """Begin another test: its keys in Redis have this prefix, and what was cached of the database is outdated."""
    from django.conf import settings
    from django.contrib.contenttypes.models import ContentType
    from django.test.signals import setting_changed

    from django_delayq.ledger.controls import stop_cache

    settings.DELAYQ = {**settings.DELAYQ, "PREFIX": prefix}
    setting_changed.send(main, setting="DELAYQ", value=settings.DELAYQ, enter=True)
    ContentType.objects.clear_cache()  # emptying the database may have created them again, with other ids
    stop_cache.forget()


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
