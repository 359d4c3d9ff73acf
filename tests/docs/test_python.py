"""The Python in README and docs runs, and does what the pages show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, pages

pytestmark = pytest.mark.slow

MOST_NOT_RUN = 3
Play = Callable[[Path], str]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Run a page, and return its error message; empty if it does what it shows."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "DELAYQ_"))}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.docs.play"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, bufsize=1, **pipes) as player:  # type: ignore[call-overload]

        def do(path: Path) -> str:
            player.stdin.write(f"{path}\n")
            return str(json.loads(player.stdout.readline()))

        yield do
        player.stdin.close()


ELSEWHERE = {"docs/tutorial.md"}
"""`test_tutorial` types these in a project of their own."""
PAGES = [
    page
    for page in pages()
    if page.name not in ELSEWHERE and not page.is_translation and any(b.language == "python" for b in page.blocks)
]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_does_what_it_shows(page: Page, play: Play) -> None:
    error = play(page.path)
    assert not error, error[-4000:]


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


ORDER = """
```python
from django_delayq import cancel_timeout, schedule_timeout
from shop.models import Order

order = Order.objects.create()
```
"""
WRONG = {
    "a value that is not as shown": (
        ORDER + '```python\ncancel_timeout(order, "cancel_unpaid")  # -> False\n```\n',
        "page.md:9: expected False, got True",
    ),
    "an expectation that is never reached": (
        ORDER + "```python\ndef view(order):\n    order.status  # -> 'paid'\n```\n",
        "page.md: never reached: line 10",
    ),
    "another output": ("```python\nprint('one, 2')\n```\n\n```text\none, two\n```\n", "this was printed"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_page_that_does_not_do_what_it_shows_fails(wrong: str, play: Play, tmp_path: Path) -> None:
    text, message = WRONG[wrong]
    (tmp_path / "page.md").write_text(text)
    assert message in play(tmp_path / "page.md")
