"""Options of the commands `replay_orders` and `play_demo`: files and tempo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management import CommandError, call_command

from shop.replay.records import UnreadableFile, read_records
from shop.replay.tempo import linear, logarithmic

if TYPE_CHECKING:
    from argparse import ArgumentParser, _ArgumentGroup
    from pathlib import Path

    from django.core.management.base import BaseCommand

    from shop.replay.records import OrderRecord
    from shop.replay.tempo import Tempo

# The files contain the time when the courier got the parcel, not the acceptance, so the merchant gets three days
# instead of five minutes.
REPLAY_DELAYS: dict[str, timedelta] = settings.SHOP_DELAYS | {"cancel_unaccepted": timedelta(days=3)}


def add_tempo(parser: ArgumentParser | _ArgumentGroup, *, seconds: float) -> None:
    """Add the two options that compress time, of which one can be used."""
    tempo = parser.add_mutually_exclusive_group()
    tempo.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help=f"twice the duration takes S seconds longer, to watch minutes and weeks together ({seconds})",
    )
    tempo.add_argument("--speed", type=float, metavar="X", help="instead, make everything X times as fast")


def tempo_of(options: dict[str, Any]) -> Tempo:
    """Return the chosen tempo.

    Raises:
        CommandError: the speed is invalid.
    """
    try:
        return linear(options["speed"]) if options["speed"] is not None else logarithmic(options["seconds"])
    except ValueError as error:
        raise CommandError(str(error)) from error


def refuse_unmigrated() -> None:
    """Raise CommandError if migrations are not applied, in place of an error about a missing table."""
    try:
        call_command("migrate", check_unapplied=True, verbosity=0)
    except SystemExit:
        raise CommandError("There are unapplied migrations; run manage.py migrate.") from None


def read_files(command: BaseCommand, orders: Path, reviews: Path | None, limit: int | None) -> list[OrderRecord]:
    """Return the records of the files, and print the omitted rows to stderr.

    Raises:
        CommandError: a file cannot be read.
    """
    try:
        reading = read_records(orders, reviews, limit=limit)
    except UnreadableFile as error:
        raise CommandError(str(error)) from error
    for words in reading.left_out:
        command.stderr.write(f"left out: {words}")
    return reading.records
