"""Real workers, and how late by the database's clock what they fired was."""

from tests.support.processes import start_worker

__all__ = ["start_worker"]
