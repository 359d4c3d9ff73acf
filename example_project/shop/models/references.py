"""References, which people use instead of primary keys."""

from __future__ import annotations

import secrets

ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"  # without similar characters


def new_reference() -> str:
    """Return a new, unguessable reference such as `7K2M-Q9XA`."""
    letters = "".join(secrets.choice(ALPHABET) for _ in range(8))
    return f"{letters[:4]}-{letters[4:]}"
