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

import django

django.setup()

from django.core.exceptions import ObjectDoesNotExist  # noqa: E402
from django.db import Error, InterfaceError, OperationalError, connection  # noqa: E402

from django_delayq import DeadlinePassed  # noqa: E402
from tests.e2e.chaos.journal import Journal  # noqa: E402
from tests.e2e.chaos.producing import by_hand, by_operators, orders  # noqa: E402, F401 - the repertoire
from tests.e2e.chaos.producing.operation import REPERTOIRE, Hands, Operation, Perform, Undo  # noqa: E402

STOPPING: list[int] = []
PAUSE_SECONDS = 0.01


def main(name: str, seed: str, journal: str) -> None:
    signal.signal(signal.SIGTERM, lambda number, _: STOPPING.append(number))
    hands = Hands(name, random.Random(f"{seed}/{name}"), Journal(Path(journal)))
    functions, weights = list(REPERTOIRE), list(REPERTOIRE.values())
    while not STOPPING:
        [function] = hands.random.choices(functions, weights)
        perform(function, Operation(hands))
        time.sleep(hands.random.uniform(0, 2 * PAUSE_SECONDS))


def perform(function: Perform, operation: Operation) -> None:
    """Perform an operation and write its outcome to the journal; after a lost connection, look it up."""
    journal = operation.hands.journal
    journal.write(operation.id, "begin", name=getattr(function, "__name__", ""))
    try:
        function(operation)
    except (Undo, DeadlinePassed, ObjectDoesNotExist) as refusal:
        journal.write(operation.id, "undone", error=type(refusal).__name__)
    except ValueError as error:
        is_gone = "the object is not in the database" in str(error)  # another process has removed the order
        journal.write(operation.id, "undone" if is_gone else "failed", error=str(error))
    except (OperationalError, InterfaceError) as error:
        journal.write(operation.id, "uncertain", error=str(error))
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
