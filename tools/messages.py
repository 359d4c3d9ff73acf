"""`make messages`: update the catalogues of all languages from the sources, and compile them. Needs GNU gettext.

    .venv/bin/python tools/messages.py                  update and compile; translate the empty messages, and repeat
    .venv/bin/python tools/messages.py extract FILE     only write the messages of the sources to FILE

New messages are left empty and never guessed from similar ones: a wrong guess looks like a translation.
`tests/unit/test_translations.py` finds empty ones.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.core.management.commands import makemessages

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_delayq"
LANGUAGES = ("ar", "de", "es", "fr", "pt_BR", "ru", "zh_Hans", "zh_Hant")


class Command(makemessages.Command):
    """Django's own command, without fuzzy matches."""

    msgmerge_options = [*makemessages.Command.msgmerge_options, "--no-fuzzy-matching"]


def update(package: Path, languages: tuple[str, ...]) -> None:
    """Make each catalogue contain the messages of the package's sources, and no others."""
    options: dict[str, Any] = {"locale": list(languages), "no_location": True, "no_wrap": True, "no_obsolete": True}
    with contextlib.chdir(package):
        call_command(Command(), **options)


def extract(file: Path) -> None:
    """Write the messages of the sources to `file`, without translations."""
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / PACKAGE.name
        shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("locale", "__pycache__"))
        (copied / "locale").mkdir()
        update(copied, ("en",))
        shutil.copy(copied / "locale/en/LC_MESSAGES/django.po", file)


def main(arguments: list[str]) -> int:
    settings.configure()
    django.setup()
    if arguments[:1] == ["extract"]:
        extract(Path(arguments[1]).resolve())
        return 0
    update(PACKAGE, LANGUAGES)
    with contextlib.chdir(PACKAGE):
        call_command("compilemessages", locale=list(LANGUAGES))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
