"""Whatever a person reads is there in every language: nothing missing, nothing left over, nothing half."""

from __future__ import annotations

import ast
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import django
import pytest

from django_delayq.scheduling.story import ACTOR_LABELS, EVENT_LABELS
from tools.messages import LANGUAGES, PACKAGE, ROOT

Catalogue = dict[tuple[str, ...], tuple[str, ...]]
"""Of each text in English, alone or with its plural, what it is in the language: as many as that has forms."""

each_language = pytest.mark.parametrize("language", LANGUAGES)


def catalogue(compiled: bytes) -> Catalogue:
    """Return the content of a compiled catalogue, without untranslated, fuzzy and obsolete entries."""
    count, originals, translations = struct.unpack_from("<8x3I", compiled)

    def texts(table: int) -> Iterator[tuple[str, ...]]:
        for place in range(count):
            length, start = struct.unpack_from("<2I", compiled, table + 8 * place)
            yield tuple(compiled[start : start + length].decode().split("\0"))

    return dict(zip(texts(originals), texts(translations), strict=True))


def file_of(language: str, ending: str) -> Path:
    return PACKAGE / "locale" / language / "LC_MESSAGES" / f"django.{ending}"


@pytest.fixture(scope="module")
def gettext() -> None:
    """GNU gettext. Without it: skipped here, failed with `CI=true`."""
    if shutil.which("xgettext") and shutil.which("msgfmt") and shutil.which("msgen"):
        return
    words = "GNU gettext is not installed: apt install gettext"
    if os.environ.get("CI") == "true":
        pytest.fail(words)
    pytest.skip(words)


@pytest.fixture(scope="module")
def compiled(gettext: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Catalogue]:
    """`compiled(po)`: what the catalogue holds, compiled just now; `--check` compares all placeholders."""
    made = tmp_path_factory.mktemp("compiled") / "django.mo"

    def compile_one(po: Path) -> Catalogue:
        done = subprocess.run(["msgfmt", "--check", "-o", made, po], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return catalogue(made.read_bytes())

    return compile_one


@pytest.fixture(scope="module")
def in_english(compiled: Callable[[Path], Catalogue], tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    """Every text that the sources mark."""
    said = tmp_path_factory.mktemp("extracted") / "said.po"
    command = [sys.executable, str(ROOT / "tools/messages.py"), "extract", str(said)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    filled = said.with_name("filled.po")
    subprocess.run(["msgen", "-o", filled, said], check=True)
    return compiled(filled)


@each_language
def test_every_text_is_translated_and_none_is_left_over(
    language: str, in_english: Catalogue, compiled: Callable[[Path], Catalogue]
) -> None:
    held = compiled(file_of(language, "po"))
    assert {"missing": in_english.keys() - held.keys(), "left over": held.keys() - in_english.keys()} == {
        "missing": set(),
        "left over": set(),
    }, "make messages, then translate what is empty"
    assert held == catalogue(file_of(language, "mo").read_bytes()), "what is installed is what is written"
    written = file_of(language, "po").read_text()
    assert "\n#~" not in written
    assert "fuzzy" not in written


def calls_of_gettext(source: Path) -> Iterator[ast.Call]:
    """Every call of a function that translates, however it was imported."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "_" or re.fullmatch(r"n?p?n?gettext(_lazy|_noop)?", name):
                yield node


def test_no_marked_text_escapes_the_extraction(in_english: Catalogue) -> None:
    """Strings that the extractor ignores are never translated: f-strings, and calls of other names."""
    known = {text for texts in in_english for text in texts}
    calls = [(path, call) for path in sorted(PACKAGE.rglob("*.py")) for call in calls_of_gettext(path)]
    escaped = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, call in calls
        if not isinstance(call.args[0], ast.Constant) or call.args[0].value not in known
    ]
    assert len(calls) > 200
    assert escaped == []


@each_language
def test_every_plural_form_of_the_language_is_there(language: str) -> None:
    held = catalogue(file_of(language, "mo").read_bytes())
    (forms,) = re.findall(r"nplurals=(\d)", held["",][0])
    assert {len(said) for text, said in held.items() if len(text) == 2} == {int(forms)}
    assert [text for text, said in held.items() if not all(form.strip() for form in said)] == []


@each_language
def test_a_word_that_django_itself_has_is_translated_as_there(language: str) -> None:
    """All catalogues are one at runtime, and an app's goes before Django's: ours would change its "Home" everywhere."""
    folders = [Path(django.__file__).parent / folder for folder in ("conf", "contrib/admin")]
    files = [folder / f"locale/{language}/LC_MESSAGES/django.mo" for folder in folders]
    theirs = {text: said for file in files for text, said in catalogue(file.read_bytes()).items()}
    ours = catalogue(file_of(language, "mo").read_bytes())
    both = {text for text in ours.keys() & theirs.keys() if text != ("",) and len(text) == 1}
    assert ("Home",) in both
    assert {text: ours[text] for text in both} == {text: theirs[text] for text in both}


def test_whatever_the_library_notes_in_a_history_has_a_name_for_people() -> None:
    sources = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    noted = r"\bwhat=\"(\w+)\"|\b(?:note|record|with_event)\(\s*row, \"(\w+)\"|\b_move\([^\n]*, \"(\w+)\""
    noted += r"|\b_moves\(\"\w+\", \"(\w+)\"|\"what\": \"(\w+)\""
    kinds = {next(filter(None, found)) for found in re.findall(noted, sources)}
    assert {"extended", "failed", "postponed", "rescheduled", "snoozed", "suspected"} <= kinds
    assert kinds - EVENT_LABELS.keys() == set()
    actors = set(re.findall(r"\bby=\"(\w+)\"", sources)) - {"perform", "preview"}  # of tests, and of a dry run
    assert actors == ACTOR_LABELS.keys()
