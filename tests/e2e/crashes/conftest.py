"""Real workers that are killed, suspended and terminated."""

from tests.support.processes import start_worker

__all__ = ["start_worker"]
