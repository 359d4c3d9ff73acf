"""The site of the docs: what it is built with, its navigation, and how much a beginner has to read."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.docs.test_facts import PROJECT
from tools.environment import PURPOSES


def test_the_site_is_built_in_an_environment_without_the_test_suite() -> None:
    assert PURPOSES["docs"][-2:] == ["--group", "docs"]
    heavy = {"selenium", "mypy", "pytest", "schemathesis", "pyright"}
    assert not heavy & {re.split(r"\W", name)[0] for name in PROJECT["dependency-groups"]["docs"]}
    makefile = (ROOT / "Makefile").read_text()
    for target in ("docs", "docs-links"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe and "DELAYQ_VENV=$(CURDIR)/.venv-docs" in recipe[1] and "$(BIN)" not in recipe[1]
