"""The admin in the visitor's language: no page has a word of English that a catalogue could have replaced."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse
from django.utils import timezone, translation

from django_delayq import operations
from django_delayq.admin import render
from django_delayq.models import Timeout
from django_delayq.scheduling.story import StoryEvent
from tests.integration.admin.conftest import DETAIL, LIST, OPERATION
from tests.unit.test_translations import catalogue, each_language, file_of, placeholders
from tools.messages import LANGUAGES

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
POLICIES = "admin:django_delayq_policycontrol_changelist"
OPERATE = "admin:django_delayq_policycontrol_operate"
VERBS = ("cancel", "fire", "postpone", "retry")
LABEL = "testapp.order.remind"


def pages(row: Timeout) -> list[str]:
    """Every address of this admin."""
    operations = [f"{reverse(OPERATION, args=[verb])}?ids={row.pk}" for verb in VERBS]
    operated = [reverse(OPERATE, args=[LABEL, name]) for name in ("pause", "hold", "resume", "delay")]
    return [reverse(LIST), reverse(DETAIL, args=[row.pk]), reverse(POLICIES), *operations, *operated]


def words_of(page: bytes) -> str:
    """Return what a reader or a screen reader gets: text, and the attributes that are read aloud."""
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", page.decode())
    said = re.findall(r'\b(?:aria-label|title|alt|data-delayq-words)="([^"]*)"', text)
    said += re.findall(r'<input type="submit"[^>]*value="([^"]*)"', text)
    return html.unescape("\n".join([re.sub(r"<[^>]*>", "\n", text), *said]))


def english_of(language: str) -> set[str]:
    """Return the English sentences of the catalogue whose translation differs."""
    held = catalogue(file_of(language, "mo").read_bytes())
    return {
        text
        for (text, *_plural), (said, *_forms) in held.items()
        if " " in text and said != text and not placeholders(text)
    }


@pytest.fixture
def browser(staff: Callable[..., Client], settings: Settings) -> Iterator[Client]:
    """A visitor who may do everything, of a site that speaks every language."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    ours = Permission.objects.filter(content_type__app_label="django_delayq")
    with translation.override(translation.get_language()):  # the middleware leaves its last visitor's behind
        yield staff(*ours.values_list("codename", flat=True))


@each_language
def test_every_page_of_the_admin_is_in_the_visitors_language(language: str, browser: Client, row: Timeout) -> None:
    operations.pause(LABEL, by="admin:alice", reason="-")
    code = translation.to_language(language)
    english = english_of(language)
    for address in pages(row):
        answer = browser.get(address, headers={"accept-language": code})
        assert answer.status_code == 200, address
        assert answer.headers["content-language"] == code
        shown = words_of(answer.content)
        lines = {line.strip() for line in re.split(r"\n|\|", shown)}
        assert [text for text in english if text in lines or f" {text} " in shown] == [], address
    with translation.override(code):
        deadline, pending = translation.gettext("deadline"), translation.gettext("pending")
    listed = words_of(browser.get(reverse(LIST), headers={"accept-language": code}).content)
    assert deadline != "deadline" and deadline.lower() in listed.lower()
    assert pending != "pending" and pending.lower() in listed.lower()


def test_a_refusal_and_a_story_are_told_in_the_visitors_language(browser: Client, row: Timeout) -> None:
    operations.hold(LABEL, by="admin:alice")
    asked = {"reason": "a storm", "confirmed": "yes"}
    refused = browser.post(reverse(OPERATE, args=[LABEL, "pause"]), asked, headers={"accept-language": "de"})
    assert f"{LABEL} ist eingefroren: Setzen Sie die Regel zuerst fort." in words_of(refused.content)
    story = words_of(browser.get(reverse(DETAIL, args=[row.pk]), headers={"accept-language": "de"}).content)
    assert "verlängert" in story
    assert "von Hand" in story


def test_the_pages_are_english_without_a_catalogue(browser: Client, row: Timeout) -> None:
    """What the test above looks for is there to be found."""
    found = words_of(browser.get(reverse(LIST), headers={"accept-language": "en"}).content)
    assert any(text in found for text in english_of(LANGUAGES[0]))


@pytest.mark.parametrize(
    ("language", "late", "shown"),
    [
        ("en", 0.0521, "0.052 s"),
        ("de", 0.0521, "0,052 s"),
        ("en", 720.0, "12 min"),
        ("de", 720.0, "12 Min."),
        ("en", 86399.6, "1 d"),
    ],
)
def test_seconds_are_written_as_the_language_writes_numbers(language: str, late: float, shown: str) -> None:
    due_at = timezone.now()
    row = Timeout(state="fired", due_at=due_at, settled_at=due_at + timedelta(seconds=late))
    event = StoryEvent(due_at, "fired", 1, details={"late": late})
    with translation.override(language):
        assert shown in render.deadline(row)
        assert shown in str(event)
        assert render.lag(1.25) == {"en": "1.2 s", "de": "1,2 s"}[language]


def test_what_fired_early_is_so_many_seconds_before_its_deadline() -> None:
    due_at = timezone.now()
    row = Timeout(state="fired", due_at=due_at, settled_at=due_at - timedelta(minutes=2))
    assert "fired 2 min before it" in render.deadline(row)
    assert "2 min before the deadline" in str(StoryEvent(due_at, "fired", 1, details={"late": -120.0}))


@pytest.mark.parametrize(("language", "shown"), [("en", "{}"), ("ar", "\u2066{}\u2069")])
def test_datetimes_in_a_sentence_are_isolated_where_letters_run_from_right_to_left(language: str, shown: str) -> None:
    at = "2030-01-02 09:00:00"
    with translation.override(language):
        assert render.isolated(f"It is due at {at}.") == f"It is due at {shown.format(at)}."
