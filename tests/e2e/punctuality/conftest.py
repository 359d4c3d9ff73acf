"""Real workers, and how late by the database's clock what they fired was."""

from tests.e2e.crashes.conftest import start_worker

__all__ = ["start_worker"]
