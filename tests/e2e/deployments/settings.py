"""The tests' settings with another Redis: `DELAYQ_TEST_DEPLOYMENT` holds what to add to DELAYQ, as JSON."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DELAYQ

DELAYQ.update(json.loads(os.environ["DELAYQ_TEST_DEPLOYMENT"]))
