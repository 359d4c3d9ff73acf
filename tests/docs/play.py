"""Run the Python of a page as its reader would, in a small Django project made of the files of the page.

    echo docs/races.md | python -m tests.docs.play

Blocks that begin with `# shop/models.py` or similar become files of an app `shop`. Missing files come from the
tutorial, whose shop all pages share, and a first block with `, at the end` is added to its file. Then the tables are
created, and the other blocks run in order, in one namespace. A block that begins with `# settings.py` is checked as
settings.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from copy import deepcopy
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

from tests.docs.expectations import Expectations, Wrong
from tests.docs.pages import ROOT, Block, Page, read

TUTORIAL = ROOT / "docs" / "tutorial.md"
WEBHOOKS = "django_delayq.contrib.webhooks"
SHARED_FILES = ("shop/models.py", "shop/timeouts.py")
_NUMBER = re.compile(r"\d+")
SETTINGS = """
SECRET_KEY = "only for the examples"
USE_TZ = True
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["*"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django_delayq", *APPS]
DATABASES = {"default": {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": __file__.replace("project_settings.py", "shop.sqlite3"),
    "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": "PRAGMA synchronous = OFF"},
}}
DELAYQ = {"REDIS": None}
"""


def serve() -> None:
    """Play the pages whose paths are the lines of the input. Print each error as a line of JSON; empty for none."""
    with tempfile.TemporaryDirectory() as home:
        _write_settings(Path(home), [])
        sys.path.insert(0, home)
        os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
        import django
        from django.core.management import call_command
        from django.db import connections

        django.setup()
        importlib.import_module("django_delayq.testing")  # with the worker, which most pages use
        call_command("migrate", verbosity=0)
        connections.close_all()
        for line in sys.stdin:
            print(json.dumps(_error_of(Path(line.strip()), Path(home))), flush=True)  # noqa: T201


def _error_of(path: Path, base: Path) -> str:
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as home:
        if not (child := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 1
            try:
                os.chdir(path.parent)
                play(read(path), Path(home), base)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return output.read() if status else ""


def play(page: Page, home: Path, base: Path) -> None:
    """Run the examples. Raise their exceptions, or `Wrong` if one does not do what the page shows."""
    from django.apps import apps
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    database = settings.DATABASES["default"]["NAME"] = str(home / "shop.sqlite3")
    shutil.copy(base / "shop.sqlite3", database)
    connections["default"].settings_dict["NAME"] = database
    _write_project(home, page)
    _write_settings(home, own := [*_own_app(page), "shop"])  # for processes that the page starts
    sys.path.insert(0, str(home))
    settings.INSTALLED_APPS += own
    apps.set_installed_apps(settings.INSTALLED_APPS)
    call_command("migrate", run_syncdb=True, verbosity=0)
    call_command("check", fail_level="ERROR", stderr=StringIO())
    try:
        with ExitStack() as until_the_end:
            _run(page, until_the_end)
    finally:
        connections.close_all()


def _run(page: Page, until_the_end: ExitStack) -> None:
    from django_delayq.testing import travel_to

    def set_clock(*local: int, zone: str = "Europe/Berlin") -> None:
        """Set the clock of the library for the rest of the page, so that its dates lie ahead. For hidden blocks."""
        until_the_end.enter_context(travel_to(datetime(*local, tzinfo=ZoneInfo(zone))))  # type: ignore[arg-type, misc]

    expectations = Expectations(page.name)
    namespace: dict[str, Any] = {"__name__": "example", "set_clock": set_clock}
    namespace |= {function.__name__: function for function in (fire_after, repeat)}
    namespace |= expectations.names()
    for block, following in zip(page.blocks, (*page.blocks[1:], None), strict=True):
        if block.language != "python" or block.not_run or block.file not in ("", "settings.py"):
            continue
        compiled = expectations.compile(block.code, block.line)
        if block.file == "settings.py":
            _check_settings(compiled)
            continue
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compiled, namespace)
        if following is not None and following.language == "text":
            _compare(page, following, printed.getvalue())
    expectations.check_all_met()


def _compare(page: Page, shown: Block, printed: str) -> None:
    """Compare the shown output with the printed one, except for numbers."""
    expected, got = (_NUMBER.sub("0", text).split() for text in (shown.code, printed))
    if expected != got:
        raise Wrong(f"{page.name}:{shown.line}: the page shows\n{shown.code}\nbut this was printed\n{printed}")


def fire_after(**span: Any) -> int:
    """Fire the timeouts that are due after this duration, and then reset the clock. For hidden blocks."""
    from django_delayq.testing import fire_due, travel

    with travel(**(span or {"seconds": 0})):
        return int(fire_due(raises=False))


def repeat(effects: Callable[[], object], *inputs: Callable[[], object], **span: Any) -> None:
    """Give the inputs of a recipe twice again, after their timeouts have fired. For hidden blocks.

    Webhooks, forms and saves are repeated, and what has left the project must not leave it again: `effects` shows it.
    """
    before = effects()
    for give in inputs * 2:
        give()
        fire_after(**(span or {"seconds": 1}))
        if (now := effects()) != before:
            raise Wrong(f"an input that was repeated after it had fired has another effect: {before!r}, then {now!r}")


def _check_settings(compiled: Any) -> None:
    """Check that the library accepts the settings, including the address of Redis."""
    from django.conf import settings
    from django.core.checks import ERROR, run_checks
    from django.test import override_settings

    from django_delayq.conf import get_settings
    from django_delayq.redis_clients import get_worker_engine

    namespace = {name: deepcopy(getattr(settings, name)) for name in ("INSTALLED_APPS", "DATABASES", "CACHES")}
    before = deepcopy(namespace)
    exec(compiled, namespace)
    changed = {name: value for name, value in namespace.items() if name.isupper() and value != before.get(name)}
    assert "django_delayq" in namespace["INSTALLED_APPS"]
    # Cannot be exchanged in a running project. Of DATABASES only the aliases can: connections stay as they are.
    changed.pop("INSTALLED_APPS", None)
    exchanged: AbstractContextManager[Any] = override_settings(**changed) if changed else nullcontext()
    with exchanged:
        get_settings()
        get_worker_engine("default")
        found = [message for message in run_checks() if message.level >= ERROR]
        assert not found, found


def _write_project(home: Path, page: Page) -> None:
    shared = {name: code for name, code in _files(read(TUTORIAL).blocks).items() if name in SHARED_FILES}
    own = _files(page.blocks, shared)
    own.pop("settings.py", None)
    for name, code in {"shop/__init__.py": "", "shop/urls.py": "urlpatterns = []\n", **shared, **own}.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)


def _write_settings(home: Path, apps: list[str]) -> None:
    (home / "project_settings.py").write_text(f"APPS = {apps}\n{SETTINGS}")


def _own_app(page: Page) -> list[str]:
    """Return the entry of INSTALLED_APPS for the app that the page is about, if it is about one."""
    settings = "".join(block.code for block in page.blocks if block.file == "settings.py")
    return [WEBHOOKS] if WEBHOOKS in settings else []


def _files(blocks: Iterable[Block], shared: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the files of the page; several blocks may form one file, or be added to one of `shared`."""
    files: dict[str, str] = {}
    for block in blocks:
        if block.language == "python" and block.file and not block.not_run:
            before = files.get(block.file, shared.get(block.file, "") if block.is_appended else "")
            files[block.file] = f"{before}\n\n{block.code}"
    return files


if __name__ == "__main__":
    serve()
