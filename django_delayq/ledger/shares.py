"""The values by which rates count, such as the merchant of an order: the column `share` of its timeout.

It is written with the round, as it is then: to claim what may begin, a worker reads no table but the ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any, Final

from django_delayq.key_types import key_type, pk_of
from django_delayq.ledger.locking import rows_of, with_keys
from django_delayq.ledger.statements import chunks
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy, registry

MAX_SHARE: Final = 64
"""The length of the column. The digest of a longer value has as many characters."""


def shares_of(policy: TimeoutPolicy[Any], object_ids: Collection[str], using: str) -> dict[str, str]:
    """Return the `share` of each of these objects now; {} for a policy whose rate does not count by a value.

    The rows must not be locked: those of a merchant would be locked by each order that is scheduled.
    """
    path, found = policy.counts_by, dict[str, str]()
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
    """Set `share` of `rows`, which are about to be written; return whether the rate of any counts by a value."""
    counted = defaultdict[TimeoutPolicy[Any], list[Timeout]](list)
    for row in rows:
        policy = registry.get(row.policy)
        if policy is not None and policy.counts_by is not None:
            counted[policy].append(row)
    for policy, own in counted.items():
        shares = shares_of(policy, {row.object_id for row in own}, using)
        for row in own:
            row.share = shares.get(row.object_id, "")
    return bool(counted)
