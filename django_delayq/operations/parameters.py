"""The kinds of parameters that operations have.

An operation in the registry declares its parameters as values of these classes. Each edge asks for them by one `match`:
`admin/forms.py`, `contrib/rest_framework/inputs.py` and `management/options.py`. What was given passes
`Operation.arguments`, which refuses it or returns the arguments of the function. What depends on rows, on the policy or
on the time is refused by the function.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.utils.translation import gettext_lazy as _


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of the function of an operation.

    Attributes:
        name: the name of the argument.
        option: the option of the command; without dashes: its positional argument.
        label, help: the words beside its field.
        default: what is proposed.
        is_required: it must be given. Not asked of alternatives.
        is_nullable: None has a meaning of its own, other than nothing.
    """

    name: str
    option: str
    label: Any
    help: Any = ""
    _: KW_ONLY
    default: Any = None
    is_required: bool = False
    is_nullable: bool = False

    def check(self, value: Any) -> None:
        """Raise ValidationError if `value`, which has the right type, is out of range."""


class Moment(Parameter):
    """A datetime."""


class Flag(Parameter):
    """True or False. The option of the command switches on what is off by default, or off what is on."""


@dataclass(frozen=True, slots=True)
class Choice(Parameter):
    """One of several values, each with its label."""

    _: KW_ONLY
    choices: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Number(Parameter):
    """An integer."""

    _: KW_ONLY
    least: int = 0
    most: int = 0

    def check(self, value: int) -> None:
        MinValueValidator(self.least)(value)
        MaxValueValidator(self.most)(value)


@dataclass(frozen=True, slots=True)
class Length(Parameter):
    """A duration.

    Attributes:
        least, most: its range. If it may be negative, it leads to an earlier time.
        unit: the unit that is proposed.
        in_units: REST has a field for each unit, which are added up, and not one for seconds.
        has_direction: the admin asks for the direction, and not for a sign.
    """

    _: KW_ONLY
    least: timedelta = timedelta(0)
    most: timedelta = timedelta.max
    unit: str = "minutes"
    in_units: bool = False
    has_direction: bool = False

    def check(self, value: timedelta) -> None:
        if not self.least <= value <= self.most:
            raise ValidationError(_("This duration is too short or too long."))
