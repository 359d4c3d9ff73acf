"""The tests' settings with another Redis: `DELAYQ_TEST_DEPLOYMENT` holds what to add to DELAYQ and CACHES, as JSON."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import CACHES, DELAYQ

added = json.loads(os.environ["DELAYQ_TEST_DEPLOYMENT"])
DELAYQ.update(added["DELAYQ"])
CACHES.update(added["CACHES"])
