"""References: what people see and say on the phone instead of a primary key."""

from __future__ import annotations

import secrets

ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"  # nothing that looks like something else


def new_reference() -> str:
    """A fresh, unguessable reference such as `7K2M-Q9XA`."""
    letters = "".join(secrets.choice(ALPHABET) for _ in range(8))
    return f"{letters[:4]}-{letters[4:]}"
