"""`manage.py play_demo`: a few dozen orders, weeks in seconds. A worker must be running."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from shop.replay.arguments import REPLAY_DELAYS, add_tempo, read_files, refuse_unmigrated, tempo_of
from shop.replay.checking import contradictions, forget
from shop.replay.display import Observer, display
from shop.replay.live import LivePlay, StillOpen
from shop.replay.made_up import made_up_records
from shop.replay.results import table

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Command(BaseCommand):
    """Place orders, pay some of them, and show what the workers do."""

    help = "Play a few dozen orders in compressed time. Exit with 0 only if all timeouts are settled and consistent."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--orders", type=int, default=40, metavar="N", help="how many (40)")
        parser.add_argument("--orders-csv", type=Path, metavar="CSV", help="real orders instead of made-up ones")
        parser.add_argument("--reviews-csv", type=Path, metavar="CSV", help="and their reviews")
        parser.add_argument("--pace", type=float, default=10.0, metavar="N", help="at most N new orders a second (10)")
        parser.add_argument("--patience", type=float, default=30.0, metavar="S", help="fail if one is later (30 s)")
        parser.add_argument("--json-summary", action="store_true", help="a JSON object as the last line")
        add_tempo(parser, seconds=0.3)

    def handle(self, **options: Any) -> None:
        refuse_unmigrated()
        play = self._prepare(options)
        observer = Observer(play)
        try:
            with display(observer) as show:
                play.run(advance=lambda: None, tick=show)
                play.wait_until_settled(options["patience"], tick=show)
            failure = ""
        except StillOpen as error:
            failure = str(error)
        found = contradictions(play.lives, play.ledger)
        self._summarize(observer, found, as_json=options["json_summary"])
        if failure or found:
            raise CommandError("\n".join(filter(None, [failure, *found[:20]])))

    def _prepare(self, options: dict[str, Any]) -> LivePlay:
        if options["orders_csv"]:
            records = read_files(self, options["orders_csv"], options["reviews_csv"], options["orders"])
            delays = REPLAY_DELAYS
        else:
            records, delays = made_up_records(options["orders"]), settings.SHOP_DELAYS
        forget((one.order_id for one in records), (one.customer_id for one in records))
        return LivePlay(records, delays, tempo_of(options), options["pace"])

    def _summarize(self, observer: Observer, found: list[str], *, as_json: bool) -> None:
        late, ledger = observer.lateness(), observer.play.ledger
        is_settled = not ledger.open_rows().exists()
        if not observer.is_drawn:
            self.stdout.write(observer.headline())
            self.stdout.write(table(ledger.counts()))
        self.stdout.write(
            f"{late.count} fired, late by {late.median} ms (median), {late.p99} ms (p99), {late.most} ms (most). "
            + ("Orders and ledger agree." if is_settled and not found else "Orders and ledger do NOT agree.")
        )
        if as_json:
            summary = {
                "orders": len(observer.play.lives),
                "timeouts": ledger.counts(),
                "late_ms": dataclasses.asdict(late),
                "settled": is_settled,
                "consistent": not found,
            }
            self.stdout.write(json.dumps(summary))
