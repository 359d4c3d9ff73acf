"""`python -m benchmarks.works.replaying ORDERS REVIEWS LIMIT`: replay on a virtual clock, print steps per second.

Runs with the settings of the example shop; the works start it with `PYTHONPATH` and `DATABASE_URL`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path


def main(orders: str, reviews: str, limit: str) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    logging.getLogger("shop.sms").setLevel(logging.WARNING)
    from shop.replay.arguments import REPLAY_DELAYS
    from shop.replay.checking import forget
    from shop.replay.records import read_records
    from shop.replay.virtual import VirtualPlay

    records = read_records(Path(orders), Path(reviews) if reviews else None, limit=int(limit)).records
    forget((one.order_id for one in records), (one.customer_id for one in records))
    play = VirtualPlay(records, REPLAY_DELAYS)
    began, cpu = time.perf_counter(), time.process_time()
    play.run(lambda: None)
    used = {"cpu_us": (time.process_time() - cpu) * 1e6 / len(play)}
    print(json.dumps({"per_second": len(play) / (time.perf_counter() - began), **used}))


if __name__ == "__main__":
    main(*sys.argv[1:])
