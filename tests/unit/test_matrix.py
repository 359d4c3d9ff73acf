"""Which packages an extra of the wheel may pull: what it names, and what that requires in turn."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from tools.matrix import needed

PACKAGES = {
    "framework": [Requirement("parser"), Requirement("zones; sys_platform == 'win32'")],
    "client": [Requirement("fast-parser; extra == 'fast'"), Requirement("tester; extra == 'tests'")],
    "queue": [Requirement("client[fast]"), Requirement("Framework")],
    "parser": [],
    "fast-parser": [],
    "unnamed": [],
}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["framework"], {"framework", "parser"}),
        (["framework", "zones; sys_platform == 'linux'"], {"framework", "parser", "zones"}),
        (["client"], {"client"}),
        (["client[fast]", "client"], {"client", "fast-parser"}),
        (["Fast_Parser"], {"fast-parser"}),
        (["queue"], {"queue", "client", "fast-parser", "framework", "parser"}),
        (["missing; python_version >= '3.13'"], set()),
    ],
)
def test_what_a_requirement_needs_follows_markers_and_extras(names: list[str], expected: set[str]) -> None:
    environment = {"sys_platform": "linux", "python_version": "3.11"}
    assert needed(map(Requirement, names), PACKAGES, environment) == expected
