"""Check that a function of the project can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def misfit(function: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Return why calling `function` with positional `arguments` would not run it; "" if it would, or may."""
    if isinstance(function, type):
        return f"is a class, {function}, which would only be instantiated; give a function or an instance."
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (function, called)):
        return "has a `yield`: calling it would only make a generator, and run none of its lines."
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"is called with ({', '.join(arguments)}), but takes {signature}: {error}."
    return ""
