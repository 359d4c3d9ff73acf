"""The settings of tests whose examples Hypothesis draws at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(number: int) -> settings:
    """Return the settings of a test with `number` examples.

    They differ from run to run, also where Hypothesis would repeat the same ones, as it does in CI. A failure prints
    the decorator that repeats its example.
    """
    return settings(
        max_examples=number,
        derandomize=False,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
