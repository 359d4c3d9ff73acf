"""The plays of the front page."""

from __future__ import annotations

from dataclasses import dataclass

from shop.delays import shop_delay
from shop.templatetags.shop import span


@dataclass(frozen=True, slots=True)
class Play:
    """A button of the front page: it orders `product`, and takes the first `steps` of the order at once."""

    title: str
    text: str
    """What happens then; `{delay}` is the delay `delay` of the shop."""
    delay: str
    product: str
    price_cents: int
    steps: tuple[str, ...] = ()
    breaks_sms: bool = False

    def __str__(self) -> str:
        return self.text.format(delay=span(shop_delay(self.delay)).replace(" ", "\u00a0"))


PLAYS = {
    "pay-late": Play(
        title="Pay late",
        text="Do nothing for {delay}: the order is cancelled. Then try to pay it.",
        delay="cancel_unpaid",
        product="Moka pot",
        price_cents=3490,
    ),
    "pay-in-time": Play(
        title="Pay in time",
        text="Pay within {delay}, then accept as the merchant: the timeouts are cancelled, not the order.",
        delay="cancel_unpaid",
        product="Hand grinder",
        price_cents=5900,
    ),
    "merchant-sleeps": Play(
        title="Let the merchant sleep",
        text="Your order is paid, but not accepted: after {delay} it is cancelled.",
        delay="cancel_unaccepted",
        product="Coffee beans",
        price_cents=1890,
        steps=("pay",),
    ),
    "break-sms": Play(
        title="Break the SMS provider",
        text="Your parcel is late after {delay}. The message about it fails until you repair the provider.",
        delay="promised_delivery",
        product="Two cups",
        price_cents=2250,
        steps=("pay", "accept"),
        breaks_sms=True,
    ),
}
