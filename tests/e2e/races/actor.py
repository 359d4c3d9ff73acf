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
    _say({"answer": "ready"})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": operations[asked.pop("operation")](**asked)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        _say(answer)


def _operations() -> Mapping[str, Callable[..., Any]]:
    from tests.e2e.races import any_verbs, bulk_verbs, payers, single_verbs

    return {
        "pay": payers.pay,
        "schedule": single_verbs.schedule,
        "single": single_verbs.anything,
        "own": single_verbs.one_after_the_other,
        "bulk": bulk_verbs.anything,
        "any": any_verbs.anything,
    }


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
