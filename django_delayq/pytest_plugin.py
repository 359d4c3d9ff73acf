"""The pytest plugin `delayq`: the fixture `timeouts`, and the end of each test for `travel` and `travel_to`.

Every pytest run of an environment with this package loads this module, also those of other projects: it imports nothing
but pytest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django_delayq.testing import Timeouts

end_of_test: ExitStack | None = None
"""What is closed when the running test ends; None: no test is running."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Give each test, with its fixtures, an `end_of_test`."""
    global end_of_test  # noqa: PLW0603 - one test runs at a time
    outer = end_of_test
    with ExitStack() as stack:
        end_of_test = stack
        try:
            return (yield)
        finally:
            end_of_test = outer


@pytest.fixture
def timeouts(db: None) -> Iterator[Timeouts]:
    """Yield the testing kit: `timeouts.travel(minutes=31)`, `timeouts.fire_due()`, `timeouts.assert_fired(...)`.

    During the test the library does not use Redis.
    """
    from django.conf import settings
    from django.test import override_settings

    from django_delayq.testing import Timeouts

    with override_settings(DELAYQ={**getattr(settings, "DELAYQ", {}), "REDIS": None}):
        yield Timeouts()
