"""Requests with a key of their caller, which have their effect once, and whose answer is stored with it.

The row of a key is committed before the effect, without an answer. A request locks it, has its effect and writes its
answer, in one transaction. So a process that dies leaves either both or none, and no row has to expire before the
request can be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from django.db import transaction

from django_delayq.ledger.locking import delete_free, for_update, transaction_of
from django_delayq.models import SLOT_BYTES, StoredAnswer
from django_delayq.times import clock

KEPT: Final = timedelta(hours=24)
"""How long an answer is stored: callers repeat a request within seconds, and after an outage within hours."""


class InProgress(Exception):
    """Another request with this key is running."""


class KeyReused(Exception):
    """The key belongs to another request."""


class Answer(NamedTuple):
    """A status and a body of JSON; `is_stored`: an earlier request got it."""

    status: int
    body: Any
    is_stored: bool = False


def digest_of(*parts: str) -> str:
    """Return a digest of strings that no other strings have."""
    return blake2b(json.dumps(parts).encode(), digest_size=SLOT_BYTES).hexdigest()


def answered_once(digest: str, request: str, using: str, act: Callable[[], Answer]) -> Answer:
    """Return the answer that is stored for `digest`; otherwise call `act` in a transaction, and store what it returns.

    Only a stored answer binds the digest to its request: if `act` raises, another request may have it. On SQLite, whose
    transactions run one after another, a simultaneous request waits for the first one and returns its answer.

    Args:
        digest: of the user and the key.
        request: the digest of the content of the request.
        using: the database on which `act` has its effect.
        act: what the request does. The body of its answer shows the row that it is about, or None, as `timeout`.

    Raises:
        InProgress: another request with this digest is running.
        KeyReused: the digest belongs to another request.
    """
    rows, now = StoredAnswer.objects.using(using).filter(digest=digest), clock.now()
    if not rows.exists():
        # A statement of its own, which waits for no lock unless two requests arrive at the same time.
        with transaction.atomic(using=using):
            rows.bulk_create([StoredAnswer(digest=digest, request=request, at=now)], ignore_conflicts=True)
    with transaction_of(using):
        row = for_update(rows, using, wait=False).first()
        if row is None:
            raise InProgress
        answer = _answer_of(row, request)
        if answer is None:
            answer = act()
            values = {"status": answer.status, "body": json.dumps(answer.body), "request": request, "at": now}
            rows.filter(pk=row.pk).update(**values, timeout_id=(answer.body["timeout"] or {}).get("id"))
        return answer


def stored_answer(digest: str, request: str, using: str) -> Answer | None:
    """Return the answer that is stored for `digest`; None: there is none. Raises KeyReused."""
    row = StoredAnswer.objects.using(using).filter(digest=digest).first()
    return None if row is None else _answer_of(row, request)


def _answer_of(row: StoredAnswer, request: str) -> Answer | None:
    if row.status is None or row.at <= clock.now() - KEPT:
        return None
    if row.request != request:
        raise KeyReused
    return Answer(row.status, json.loads(row.body), is_stored=True)


def forget_old_answers(using: str) -> None:
    """Delete the answers that are older than `KEPT`, but those that a request has locked."""
    delete_free(StoredAnswer.objects.using(using).filter(at__lte=clock.now() - KEPT).order_by("at"), using)
