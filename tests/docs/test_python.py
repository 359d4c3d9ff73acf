"""The Python in README and docs runs, and does what the pages show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, pages

pytestmark = pytest.mark.slow

MOST_NOT_RUN = 3


def play(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "DELAYQ_"))}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.docs.play", str(path)]
    return subprocess.run(
        command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


ELSEWHERE = {"docs/tutorial.md"}
"""`test_tutorial` types these in a project of their own."""
PAGES = [
    page
    for page in pages()
    if page.name not in ELSEWHERE and not page.is_translation and any(b.language == "python" for b in page.blocks)
]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_does_what_it_shows(page: Page) -> None:
    done = play(page.path)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_inputs_of_each_recipe_with_an_outside_effect_are_repeated() -> None:
    """A refund of the docs was sent again with each repeated webhook: its check repeated it before the worker ran."""
    python = {page.name: [block for block in page.blocks if block.language == "python"] for page in PAGES}
    shown = {name: "".join(block.code for block in blocks if not block.hidden) for name, blocks in python.items()}
    hidden = {name: "".join(block.code for block in blocks if block.hidden) for name, blocks in python.items()}
    having = {name for name, code in shown.items() if "idempotency_key" in code}
    assert having and {name for name in having if "\nrepeat(" not in hidden[name]} == set()


def test_hardly_any_python_is_left_out() -> None:
    left_out = [(page.name, block.line, block.not_run) for page in pages() for block in page.blocks if block.not_run]
    assert len(left_out) <= MOST_NOT_RUN, left_out


@pytest.fixture
def play_text(tmp_path: Path) -> Callable[[str], str]:
    """Run a page with this content, and return its error message."""

    def do(text: str) -> str:
        path = tmp_path / "page.md"
        path.write_text(text)
        done = play(path)
        assert done.returncode, "the page was played to its end"
        return done.stderr

    return do


PREAMBLE = """
```python
from django_delayq import cancel_timeout, schedule_timeout
from shop.models import Order

order = Order.objects.create()
```
"""


def test_a_value_that_is_not_as_shown_fails(play_text: Callable[[str], str]) -> None:
    output = play_text(PREAMBLE + '```python\ncancel_timeout(order, "cancel_unpaid")  # -> False\n```\n')
    assert "page.md:9: expected False, got True" in output


def test_an_error_that_does_not_come_fails(play_text: Callable[[str], str]) -> None:
    output = play_text(PREAMBLE + '```python\nschedule_timeout(order, "cancel_unpaid")  # raises InvalidDelay\n```\n')
    assert "page.md:9: expected InvalidDelay, and nothing was raised" in output


def test_an_expectation_that_is_never_reached_fails(play_text: Callable[[str], str]) -> None:
    output = play_text(PREAMBLE + "```python\ndef view(order):\n    order.status  # -> 'paid'\n```\n")
    assert "page.md: never reached: line 10" in output


def test_another_text_than_the_shown_one_fails(play_text: Callable[[str], str]) -> None:
    assert "this was printed" in play_text("```python\nprint('one, 2')\n```\n\n```text\none, two\n```\n")


def test_a_setting_that_does_not_exist_fails(play_text: Callable[[str], str]) -> None:
    output = play_text("```python\n# settings.py\nDELAYQ = {'REDIS': None, 'HORIZONT': 1}\n```\n")
    assert "Did you mean 'HORIZON'?" in output
