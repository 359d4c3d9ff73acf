"""Loads Django in RQ's worker before it forks: `rq worker -c tests.e2e.executors.rq_config`."""

import os

import django

django.setup()
REDIS_URL = os.environ["DELAYQ_TEST_BROKER"]
