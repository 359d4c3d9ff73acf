"""`manage.py replay_orders`: replay recorded orders."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from shop.replay.arguments import REPLAY_DELAYS, add_tempo, read_files, refuse_unmigrated, tempo_of
from shop.replay.checking import contradictions, forget
from shop.replay.live import LivePlay, StillOpen
from shop.replay.progress import progress
from shop.replay.results import table
from shop.replay.virtual import VirtualPlay
from shop.replay.workers import WorkersFailed, delays_in_environment, workers

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from shop.replay.records import OrderRecord


class Command(BaseCommand):
    """Play every order of the files, on a virtual clock or with real workers, and count the timeouts."""

    help = "Replay recorded orders (the public Olist format), and count the timeouts by state."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--orders", type=Path, required=True, metavar="CSV")
        parser.add_argument("--reviews", type=Path, metavar="CSV")
        parser.add_argument("--limit", type=int, metavar="N", help="only the first N orders of the file")
        parser.add_argument("--virtual", action="store_true", help="on a virtual clock, as fast as possible")
        parser.add_argument("--until-settled", action="store_true", help="virtual: continue until none is pending")
        parser.add_argument("--check", action="store_true", help="compare orders and ledger; exit 1 on a mismatch")
        parser.add_argument("--json", action="store_true", help="the counts of timeouts as the last line, in JSON")
        live = parser.add_argument_group("in compressed real time (without --virtual)")
        live.add_argument("--pace", type=float, default=40.0, metavar="N", help="at most N new orders a second (40)")
        live.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes to start (2)")
        live.add_argument("--no-workers", action="store_const", dest="workers", const=0, help="you run them")
        live.add_argument("--patience", type=float, default=30.0, metavar="S", help="fail if one is later (30 s)")
        add_tempo(live, seconds=1.0)

    def handle(self, **options: Any) -> None:
        refuse_unmigrated()
        records = read_files(self, options["orders"], options["reviews"], options["limit"])
        if removed := forget((one.order_id for one in records), (one.customer_id for one in records)):
            self.stderr.write(f"Removed {removed} orders that an earlier run had left.")
        try:
            play = self._play_virtual(records, options) if options["virtual"] else self._play_live(records, options)
        except (StillOpen, WorkersFailed) as error:
            raise CommandError(str(error)) from error
        counts = play.ledger.counts()
        self.stdout.write(table(counts))
        if options["check"]:
            self._check(play, may_be_open=options["virtual"] and not options["until_settled"])
        if options["json"]:
            self.stdout.write(json.dumps(counts))

    def _play_virtual(self, records: list[OrderRecord], options: dict[str, Any]) -> VirtualPlay:
        if options["verbosity"] < 2:
            logging.getLogger("shop.sms").setLevel(logging.WARNING)  # thousands of messages that are not really sent
        play = VirtualPlay(records, REPLAY_DELAYS)
        with progress("steps", len(play)) as advance:
            play.run(advance, until_settled=options["until_settled"])
        return play

    def _play_live(self, records: list[OrderRecord], options: dict[str, Any]) -> LivePlay:
        play = LivePlay(records, REPLAY_DELAYS, tempo_of(options), options["pace"])
        if not options["workers"]:
            self.stderr.write(f"Run the workers with SHOP_DELAYS='{delays_in_environment(play.delays)}'")
        with workers(options["workers"], play.delays):
            with progress("orders placed", len(records)) as advance:
                play.run(advance, tick=lambda: None)
            play.wait_until_settled(options["patience"], tick=lambda: None)
        return play

    def _check(self, play: VirtualPlay | LivePlay, *, may_be_open: bool) -> None:
        found = contradictions(play.lives, play.ledger, may_be_open=may_be_open)
        for words in found:
            self.stderr.write(words)
        if found:
            raise CommandError(f"{len(found)} contradictions between orders and ledger.")
        self.stdout.write(f"{len(play.lives)} orders: each has one outcome, and order and ledger agree.")
