"""What the commands `replay_orders` and `play_demo` have in common: their files and their tempo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import CommandError

from shop.replay.records import UnreadableFile, read_records
from shop.replay.tempo import linear, logarithmic

if TYPE_CHECKING:
    from argparse import ArgumentParser, _ArgumentGroup
    from pathlib import Path

    from django.core.management.base import BaseCommand

    from shop.replay.records import OrderRecord
    from shop.replay.tempo import Tempo

# The files know the moment of the hand-over, not of the merchant's word, so the merchant gets three days
# instead of five minutes.
REPLAY_DELAYS: dict[str, timedelta] = settings.SHOP_DELAYS | {"cancel_unaccepted": timedelta(days=3)}


def add_tempo(parser: ArgumentParser | _ArgumentGroup, *, seconds: float) -> None:
    """The two ways to compress time, of which one can be chosen."""
    tempo = parser.add_mutually_exclusive_group()
    tempo.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help=f"twice as long takes S seconds longer, so that minutes and weeks can be watched together ({seconds})",
    )
    tempo.add_argument("--speed", type=float, metavar="X", help="everything X times as fast instead")


def tempo_of(options: dict[str, Any]) -> Tempo:
    """The chosen tempo.

    Raises:
        CommandError: a speed that is none.
    """
    try:
        return linear(options["speed"]) if options["speed"] is not None else logarithmic(options["seconds"])
    except ValueError as error:
        raise CommandError(str(error)) from error


def read_files(command: BaseCommand, orders: Path, reviews: Path | None, limit: int | None) -> list[OrderRecord]:
    """The records of the files; rows that had to be left out are named on stderr.

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
