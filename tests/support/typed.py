"""Short names of the types of fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import TimeoutPolicy

Declare = Callable[..., TimeoutPolicy[Any]]
Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
