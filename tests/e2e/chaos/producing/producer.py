"""A producer process: performs operations until SIGTERM, whatever happens to its connections.

python -m tests.e2e.chaos.producing.producer NAME SEED JOURNAL
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import django
from django.db import Error, InterfaceError, OperationalError, connection

if TYPE_CHECKING:
    from tests.e2e.chaos.producing.operation import Operation, Perform

STOPPING: list[int] = []
PAUSE_SECONDS = 0.01
LOST = (OperationalError, InterfaceError)


def main(name: str, seed: str, journal: str) -> None:
    django.setup()
    signal.signal(signal.SIGTERM, lambda number, _: STOPPING.append(number))
    from tests.e2e.chaos.journal import Journal
    from tests.e2e.chaos.producing.operation import Hands, Operation
    from tests.e2e.chaos.producing.repertoire import OPERATIONS

    hands = Hands(name, random.Random(f"{seed}/{name}"), Journal(Path(journal)))
    operations, weights = list(OPERATIONS), list(OPERATIONS.values())
    while not STOPPING:
        [function] = hands.random.choices(operations, weights)
        perform(function, Operation(hands))
        time.sleep(hands.random.uniform(0, 2 * PAUSE_SECONDS))


def perform(function: Perform, operation: Operation) -> None:
    """Perform an operation and write its outcome to the journal; after a lost connection, look it up."""
    from django.core.exceptions import ObjectDoesNotExist

    from django_delayq import DeadlinePassed
    from tests.e2e.chaos.producing.operation import Undo

    journal = operation.hands.journal
    journal.write(operation.id, "begin", name=getattr(function, "__name__", ""))
    try:
        function(operation)
    except Undo:
        journal.write(operation.id, "undone", why="its producer changed its mind")
    except (DeadlinePassed, ObjectDoesNotExist) as refusal:
        journal.write(operation.id, "undone", why=type(refusal).__name__)
    except ValueError as error:
        is_gone = "the object is not in the database" in str(error)  # another process has removed the order
        journal.write(operation.id, "undone" if is_gone else "failed", error=str(error))
    except LOST as error:
        cause = error.__cause__ or error
        journal.write(operation.id, "uncertain", error=str(error), sqlstate=getattr(cause, "sqlstate", None))
        resolve(operation)
    except Exception:
        journal.write(operation.id, "failed", error=traceback.format_exc())
        reset()
    else:
        journal.write(operation.id, "done")
        operation.hands.own.extend(operation.orders)


def resolve(operation: Operation) -> None:
    """Ask the database until it answers whether the operation was committed."""
    reset()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 FROM chaos_operation WHERE id = %s", [operation.id])
                committed = cursor.fetchone() is not None
        except Error:
            reset()
            time.sleep(0.1)
            continue
        operation.hands.journal.write(operation.id, "resolved", committed=committed)
        if committed:
            operation.hands.own.extend(operation.orders)
        return


def reset() -> None:
    with contextlib.suppress(Exception):
        connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
