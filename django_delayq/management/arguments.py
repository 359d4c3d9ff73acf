"""Options that mean the same from a program, `call_command("...", policy="shop.order.x")`, as from a shell."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError


class TypedCommand(BaseCommand):
    """`call_command` hands options over as they are: a text where the shell's would have been parsed or put in a list.

    Taken as it is, `queue="slow"` would be four queues of one letter each.
    """

    def execute(self, *args: Any, **options: Any) -> str | None:
        """As Django's, with options as argparse would have made them. Raises CommandError for what it would refuse."""
        for action in self.create_parser("manage.py", type(self).__module__.rpartition(".")[2])._actions:
            if options.get(action.dest) is not None:
                options[action.dest] = _parsed(action, options[action.dest])
        return super().execute(*args, **options)


def _parsed(action: argparse.Action, value: Any) -> Any:
    if isinstance(action, argparse._AppendAction) or action.nargs in {"*", "+"}:
        values = value if isinstance(value, list | tuple | set | frozenset) else [value]
        return [_one(action, each) for each in values]
    return _one(action, value)


def _one(action: argparse.Action, value: Any) -> Any:
    """What argparse makes of a text or a number; a moment, a length of time or a flag is what it is meant to be."""
    name = "/".join(action.option_strings) or action.dest
    if isinstance(value, str | int) and not isinstance(value, bool) and callable(action.type):
        try:
            value = action.type(str(value))
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            raise CommandError(f"Error: argument {name}: {error}") from error
    elif isinstance(value, int) and not isinstance(value, bool) and action.type is None and action.nargs != 0:
        value = str(value)
    if action.choices is not None and value not in action.choices:
        raise CommandError(f"Error: argument {name}: {value!r} is none of {', '.join(map(str, action.choices))}")
    return value
