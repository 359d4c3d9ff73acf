"""The form of the shop."""

from __future__ import annotations

from django import forms


class ReviewForm(forms.Form):
    """One to five stars and a few words."""

    score = forms.TypedChoiceField(
        label="Stars", choices=[(stars, f"{'★' * stars}{'☆' * (5 - stars)}") for stars in range(5, 0, -1)], coerce=int
    )
    text = forms.CharField(
        label="In your words (optional)", required=False, max_length=1000, widget=forms.Textarea(attrs={"rows": 2})
    )
