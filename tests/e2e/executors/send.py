"""Send messages, as any process with access to the queue can: `python -m tests.e2e.executors.send '[message, ...]'`."""

from __future__ import annotations

import json
import os
import sys

import django
from django.utils.module_loading import import_string

if __name__ == "__main__":
    django.setup()
    executor = import_string(os.environ["DELAYQ_TEST_EXECUTOR"])("default", 1)
    for message in json.loads(sys.argv[1]):
        executor.send(message)
    executor.close()
