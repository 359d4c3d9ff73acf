"""Arm the objects that a group of firings has saved together, at the end of its transaction.

To read the states of fifty objects costs little more than to read that of one. Only the state at the end of the
transaction matters, and `ArmingLater.arm` is called before any other statement that concerns the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections

from django_delayq.arming.reconcile import arm_many, arm_one
from django_delayq.conf import get_settings
from django_delayq.key_types import root_of_key
from django_delayq.policies import TimeoutPolicy

FEWEST_TOGETHER = 5
"""Fewer objects are armed one by one, because those queries are compiled once."""


class ArmingLater:
    """Objects that handlers have saved in the transaction in which a worker fires a group of timeouts."""

    def __init__(self, using: str) -> None:
        self.is_arming = False
        self._using = using
        self._noted: dict[tuple[TimeoutPolicy[Any], ...], set[Any]] = {}
        self._armed: dict[tuple[TimeoutPolicy[Any], ...], set[Any]] = {}

    def note(self, policies: tuple[TimeoutPolicy[Any], ...], pk: Any) -> None:
        """Have the object armed by the next `arm`, as `arm_one` does."""
        self._noted.setdefault(policies, set()).add(pk)

    def arm(self) -> None:
        """Arm, move or cancel for the noted objects. Raises what a callable of a policy raises, or the database."""
        noted, self._noted = self._noted, {}
        self.is_arming = True
        try:
            for policies, found in noted.items():
                self._armed.setdefault(policies, set()).update(found)
                pks = sorted(set(map(root_of_key(policies[0].concrete_model).to_python, found)))
                if len(pks) >= FEWEST_TOGETHER:
                    arm_many(policies, pks, self._using, get_settings().catch_up, signals=True)
                else:
                    for pk in pks:  # a savepoint that was rolled back has released its locks
                        arm_one(policies, pk, self._using, is_locked=False)
        finally:
            self.is_arming = False

    def arm_again(self) -> None:
        """Note all objects again: a savepoint was rolled back, and with it perhaps what `arm` has written."""
        for policies, found in self._armed.items():
            self._noted.setdefault(policies, set()).update(found)
        self._armed.clear()


_later: WeakKeyDictionary[Any, ArmingLater] = WeakKeyDictionary()


def noted_in(using: str) -> ArmingLater | None:
    """Return what notes the objects that this thread saves in database `using`; None: they are armed at once."""
    return _later.get(connections[using])


@contextmanager
def arming_later(using: str) -> Iterator[ArmingLater]:
    """Note what this thread saves in database `using` instead of arming it, until the block ends.

    The caller calls `arm`, or rolls the transaction back.
    """
    _later[connections[using]] = later = ArmingLater(using)
    try:
        yield later
    finally:
        _later.pop(connections[using], None)
