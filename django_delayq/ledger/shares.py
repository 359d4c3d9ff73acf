"""The values by which rates count and batches are cut, such as the merchant of an order: the column `share`.

It is written with the round, as it is then: to claim what may begin, a worker reads no table but the ledger. A batch of
one value compares it with the locked objects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final

from django.db import connections

from django_delayq.ledger.locking import for_update, rows_of, with_keys
from django_delayq.models import RateShare, Timeout, TimeoutQuerySet
from django_delayq.policy.policies import TimeoutPolicy, labels_of, registry
from django_delayq.sql.key_types import HAS_SHARE, key_type, pk_of
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import chunks

MAX_SHARE: Final = 64
"""The length of the column. The digest of a longer value has as many characters."""
LOCK_KEPT: Final = timedelta(days=1)
"""How long the row of a value that firings lock is kept: those of customers who are gone must not stay for good."""


def shares_of(policy: TimeoutPolicy[Any], object_ids: Collection[str], using: str) -> dict[str, str]:
    """Return the `share` of each of these objects now; {} for a policy without such a value.

    The rows must not be locked: those of a merchant would be locked by each order that is scheduled.
    """
    path, found = policy.share_path, dict[str, str]()
    if path is None:
        return found
    model, text = policy.concrete_model, key_type(policy.concrete_model).text
    for ids in chunks(list(object_ids)):
        rows = with_keys(rows_of(model, using), [pk_of(model, object_id) for object_id in ids])
        found |= {text(pk): _share(value) for pk, value in rows.values_list("pk", path)}
    return found


def _share(value: Any) -> str:
    """Return a value as the text that the column holds; "" for NULL."""
    share = "" if value is None else str(value)
    return share if len(share) <= MAX_SHARE else blake2b(share.encode(), digest_size=MAX_SHARE // 2).hexdigest()


def set_shares(rows: Sequence[Timeout], using: str) -> bool:
    """Set `share` of `rows`, which are about to be written; return whether the policy of any has such a value."""
    counted = defaultdict[TimeoutPolicy[Any], list[Timeout]](list)
    for row in rows:
        policy = registry.get(row.policy)
        if policy is not None and policy.share_path is not None:
            counted[policy].append(row)
    for policy, own in counted.items():
        shares = shares_of(policy, {row.object_id for row in own}, using)
        for row in own:
            row.share = shares.get(row.object_id, "")
    return bool(counted)


def provide_lock(policy: TimeoutPolicy[Any], share: str, using: str, kept: timedelta = LOCK_KEPT) -> None:
    """Insert the row that `lock_share` locks, if it is missing. Call it before the transaction that locks it.

    Where two workers insert it at once, InnoDB would let both lock it, and then abort one that wants to write. `kept`:
    how long it stays if nothing is stored in it. Of a rate no time at all, because it has when the next slot is free.
    """
    if not connections[using].features.has_select_for_update or _locks_of(policy, share, using).exists():
        return
    row = RateShare(policy=policy.label, share=share, free_at=database_now(using) + kept)
    RateShare.objects.using(using).bulk_create([row], ignore_conflicts=True)


def lock_share(policy: TimeoutPolicy[Any], share: str, using: str) -> bool:
    """Reserve the timeouts of one value, or the slots of a policy, for this transaction; False: another one has them.

    Without waiting. On SQLite, of which only one transaction at a time may write, the transaction has them.
    """
    if not connections[using].features.has_select_for_update:
        return True
    return bool(for_update(_locks_of(policy, share, using), using, wait=False).values_list("pk"))


def _locks_of(policy: TimeoutPolicy[Any], share: str, using: str) -> Any:
    return RateShare.objects.using(using).filter(policy=policy.label, share=share)


def forget_shares(rows: Sequence[Timeout], using: str) -> None:
    """Delete what is stored of the values of `rows`, except those that an unsettled timeout has.

    The rate of such a value begins to count again.
    """
    shares = {row.share for row in rows} - {""}
    labels = {label for policy in {row.policy for row in rows} for label in labels_of(policy)}
    needed = Timeout.objects.using(using).unsettled().filter(HAS_SHARE, policy__in=labels, share__in=shares)
    shares -= set(needed.values_list("share", flat=True))
    RateShare.objects.using(using).filter(policy__in=labels, share__in=shares).delete()


def due_of_share(policy: TimeoutPolicy[Any], share: str, using: str) -> TimeoutQuerySet:
    """Return the due rows of one value of `batch_by`, longest due first, by `delayq_share`."""
    rows = Timeout.objects.using(using).due().filter(HAS_SHARE, share=share, policy__in=policy.labels)
    return rows.order_by("run_at", "id")
