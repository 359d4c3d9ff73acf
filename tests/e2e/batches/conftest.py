"""Real workers, and what they left in the ledger."""

from tests.e2e.fairness.conftest import source as source  # noqa: PLC0414 - a fixture, for the tests here
from tests.support.processes import start_worker as start_worker  # noqa: PLC0414 - a fixture, for the tests here
