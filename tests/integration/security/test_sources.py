"""Nothing here turns data into code; and an address of Redis, which may hold a password, is never shown."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks

from django_delayq.conf import get_settings
from django_delayq.redis_clients import get_worker_engine
from tests.support.typed import Log

ROOT = Path(__file__).resolve().parents[3]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "subprocess", "pty"}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "mark_safe", "raw"}


def dangers(text: str) -> Iterator[str]:
    """Return what in a module's source could run foreign code."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)} & MODULES
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            owner = getattr(getattr(node.func, "value", None), "id", None)
            if name in CALLS and (name, owner) != ("compile", "re"):
                yield f"{name}()"
            words = {"extra": {"select", "where", "tables"}}.get(str(name), {"shell"})
            yield from (f"{keyword.arg}=" for keyword in node.keywords if keyword.arg in words)


def test_no_module_can_turn_data_into_code() -> None:
    # `compiler.compile` is Django's, of SQL expressions; an order by the key contains no data.
    modules = sorted((ROOT / "django_delayq").rglob("*.py"))
    assert len(modules) > 80
    known = {"compiler.compile(": "compiler.as_text(", '.extra(order_by=["pk"])': ""}
    texts = {path: path.read_text() for path in modules}
    for words, harmless in known.items():
        texts = {path: text.replace(words, harmless) for path, text in texts.items()}
    found = {str(path.relative_to(ROOT)): list(dangers(text)) for path, text in texts.items()}
    assert {name: words for name, words in found.items() if words} == {}


PASSWORD = "pa55-of-redis"
ADDRESSES = [
    f"redis://user:{PASSWORD}@localhost:1/0",
    f"redis:/user:{PASSWORD}@localhost",
    f"redis//:{PASSWORD}@redis.internal/0",
    f"redis://:{PASSWORD}@localhost:port/0",
    f"redis+sentinel://:{PASSWORD}@localhost",
    f"http://:{PASSWORD}@localhost",
    f"user:{PASSWORD}@localhost:6433",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_password_is_in_no_repr_no_error_and_no_check(settings: Any, address: str, caplog: Log) -> None:
    settings.DELAYQ = {"REDIS": address}
    said = [str(message) for message in run_checks(tags=["django_delayq"])]
    try:
        said.append(repr(get_settings()))
        engine = get_worker_engine("default")
        assert engine is not None
        said += [repr(engine), str(vars(engine).keys())]
        engine.queue("default", 0).stats()
    except Exception as error:
        said += _all_of(error)
    assert said
    assert PASSWORD not in " ".join([*said, caplog.text])


def _all_of(error: BaseException | None) -> list[str]:
    """What the error and its causes say."""
    return [] if error is None else [repr(error), str(error), *_all_of(error.__cause__ or error.__context__)]
