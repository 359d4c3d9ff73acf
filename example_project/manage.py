#!/usr/bin/env python
"""Run the commands of the shop: `python manage.py help` lists them."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
