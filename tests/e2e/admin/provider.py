"""The shop's settings with a provider of text messages that fails for some numbers, and without `LOGGING`."""

from __future__ import annotations

from typing import ClassVar

from config.settings import *  # noqa: F403
from django_delayq import GiveUp, Skip

LOGGING = {}
SHOP_SMS_GATEWAY = f"{__name__}.Provider"
BUSY, UNKNOWN, DOWN, NONE = "+44 20 7946 0101", "+44 20 7946 0102", "+44 20 7946 0103", ""


class Provider:
    """A provider that does not answer the first call for `BUSY`, and no call for `DOWN`."""

    called: ClassVar[set[str]] = set()

    def send(self, recipient: str, text: str, *, key: str) -> None:
        if recipient == NONE:
            raise Skip("the customer has no phone")
        if recipient == UNKNOWN:
            raise GiveUp(f"sms.example.com: unknown number {recipient}")
        if recipient == DOWN or (recipient == BUSY and key not in self.called):
            self.called.add(key)
            raise ConnectionError("no answer from sms.example.com")
