"""What came of an operator's verb: how many rows changed, which, and why the others did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

NAMED: Final = 1_000
"""So many rows are named, of those that changed and of those that did not; all of them are counted."""


class Refusal(TextChoices):
    """Why a row stays as it is. The label is a sentence for people."""

    MISSING = "missing", _("there is no such timeout any more")
    SETTLED = "settled", _("it is settled already")
    FIRING = "firing", _("it is firing just now")
    DEAD = "dead", _("it is dead: retry it")
    NOT_DEAD = "not_dead", _("it is not dead")
    OBJECT_GONE = "object_gone", _("its object is gone")
    SLOT_TAKEN = "slot_taken", _("a newer round is pending")
    POLICY_UNKNOWN = "policy_unknown", _("its policy is not declared any more")
    POLICY_STOPPED = "policy_stopped", _("its policy is paused: resume that first")
    NOT_LATER = "not_later", _("its deadline is not earlier than that")
    TOO_FAR = "too_far", _("that is farther away than a deadline can be")


class Refused(NamedTuple):
    """A row that stays as it is, and why."""

    id: int
    why: Refusal


@dataclass(frozen=True, slots=True)
class Steered:
    """What a verb did, or with `dry_run` would have done.

    Attributes:
        verb: `cancel`, `fire_now`, `postpone` or `retry`.
        changed: how many rows.
        refused: how many of each kind stay as they are.
        ids: the first `NAMED` rows that changed. The pages that `progress` gets name all of theirs.
        refusals: the first `NAMED` that did not.
        dry_run: nothing was written.
    """

    verb: str
    changed: int = 0
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    refusals: tuple[Refused, ...] = ()
    dry_run: bool = False

    @property
    def unchanged(self) -> int:
        """How many rows stay as they are."""
        return sum(self.refused.values())

    def __add__(self, other: Steered) -> Steered:
        """This and what `other`, of the same verb, adds."""
        return Steered(
            self.verb,
            self.changed + other.changed,
            dict(Counter(self.refused) + Counter(other.refused)),
            (self.ids + other.ids)[:NAMED],
            (self.refusals + other.refusals)[:NAMED],
            self.dry_run,
        )


def steered(verb: str, ids: list[int], refusals: list[Refused], *, dry_run: bool) -> Steered:
    """The result of one page."""
    counts = dict(Counter(why for _, why in refusals))
    return Steered(verb, len(ids), counts, tuple(ids), tuple(refusals), dry_run)
