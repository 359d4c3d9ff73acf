"""The forms of the shop."""

from __future__ import annotations

from typing import Any

from django import forms

CATALOGUE = {  # product: price in cents
    "Coffee beans, 1 kg": 1890,
    "Moka pot": 3490,
    "Hand grinder": 5900,
    "Two cups and saucers": 2250,
}


class ShopForm(forms.Form):
    """The layout of the forms."""

    template_name_div = "shop/form.html"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"label_suffix": "", **kwargs})


class OrderForm(ShopForm):
    """A new order and its customer."""

    name = forms.CharField(label="Your name", max_length=100, widget=forms.TextInput(attrs={"autocomplete": "name"}))
    phone = forms.RegexField(
        r"^\+?[0-9 ()/-]{5,29}$",
        label="Phone, for text messages",
        widget=forms.TextInput(attrs={"autocomplete": "tel", "type": "tel"}),
        error_messages={"invalid": "Please enter digits, such as +49 170 5550100."},
    )
    product = forms.ChoiceField(
        label="What would you like?",
        choices=[(name, f"{name} · €{cents / 100:.2f}") for name, cents in CATALOGUE.items()],
    )

    @property
    def price_cents(self) -> int:
        """Return the price of the chosen product."""
        return CATALOGUE[self.cleaned_data["product"]]


class ReviewForm(ShopForm):
    """One to five stars and a few words."""

    score = forms.TypedChoiceField(
        label="Stars", choices=[(stars, f"{'★' * stars}{'☆' * (5 - stars)}") for stars in range(5, 0, -1)], coerce=int
    )
    text = forms.CharField(
        label="In your words (optional)", required=False, max_length=1000, widget=forms.Textarea(attrs={"rows": 2})
    )
