"""Provide a pseudo-language in which untranslated strings are visible as plain English."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any

from django.utils import translation

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

WIDE = {ord(letter): ord(letter) + 0xFEE0 for letter in map(chr, range(128)) if letter.isalpha()}
KEPT = re.compile(r"(%\(\w+\)[sdf]|%[sdf]|\{[^{}]*\}|<[^>]*>|&\w+;)")
WORD = re.compile(r"[A-Za-z]{2,}")
READ_OUT = re.compile(r'\b(?:aria-label|title|alt|placeholder|data-delayq-words|data-left|data-done)="([^"]*)"')
BUTTON = re.compile(r'<input type="submit"[^>]*value="([^"]*)"')


def pseudo(text: str) -> str:
    """`text` in wide letters. Placeholders and tags stay, so that what is put into a sentence has to be translated."""
    return "".join(part if KEPT.fullmatch(part) else part.translate(WIDE) for part in KEPT.split(str(text)))


def speak_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every translation from now on, Django's and REST framework's too, is into that language."""
    told: dict[str, Any] = {
        "gettext": pseudo,
        "pgettext": lambda _context, text: pseudo(text),
        "ngettext": lambda one, many, number: pseudo(one if number == 1 else many),
        "npgettext": lambda _context, one, many, number: pseudo(one if number == 1 else many),
    }
    behind: Any = vars(translation)["_trans"]  # what all of Django's functions for it ask
    for name, function in told.items():
        monkeypatch.setattr(behind, name, function)


def words_of(page: bytes) -> str:
    """Return the visible content of a page, and the attributes that screen readers use."""
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", page.decode())
    said = [*READ_OUT.findall(text), *BUTTON.findall(text)]
    return html.unescape("\n".join([re.sub(r"<[^>]*>", "\n", text), *said]))


def english_in(text: str, data: Iterable[str] = ()) -> list[str]:
    """Return the untranslated words of `text`, except those that the regular expressions `data` match."""
    for pattern in data:
        text = re.sub(pattern, " ", text)
    return sorted(set(WORD.findall(text)))
