"""Measure the pages of the admin, the REST API and the commands for operators, with 1,000,000 pending rows.

DELAYQ_TEST_DB=postgresql python -m benchmarks.pages [admin] [rest] [reports] [commands] [--rows N] [--settled N]

Each figure is a whole request through a test client, without the network, or a whole command without the start of
Python and Django. `first` is the first request, `p50` and `max` are those of the repetitions, in milliseconds.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.ground import ground, show
from benchmarks.pages import admin, commands, reports, rest
from benchmarks.pages.rows import fill, fill_orders

PARTS = {"reports": reports, "admin": admin, "rest": rest, "commands": commands}  # reports count all rows first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--rows", type=int, default=1_000_000, help="pending rows")
    parser.add_argument("--settled", type=int, help="settled rows (default: three tenths of the pending ones)")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with ground():
        began = time.perf_counter()
        fill_orders()
        fill(options.rows, options.rows * 3 // 10 if options.settled is None else options.settled)
        filled = round(time.perf_counter() - began, 1)
        for name, module in PARTS.items():
            if not options.parts or name in options.parts:
                show(f"{name}, ms, {options.rows} pending, filled in {filled} s", module.figures(options.times))


if __name__ == "__main__":
    main()
