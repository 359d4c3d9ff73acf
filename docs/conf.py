"""Build the site: `make docs`, or `sphinx-build -W docs build/docs`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "example_project")]
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
django.setup()

from django_delayq import __version__  # noqa: E402

project = "django-delayq"
author = "the django-delayq maintainers"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["monitoring/*"]
nitpicky = True
# Sites of others are not read, because the build must work offline.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|datetime|django)\..*"),
    ("py:exc", r"obj\.DoesNotExist"),
    ("py:class", r".*\.NewestTimeouts"),
]

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["diagrams.css"]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 4

# Docstrings have backticks as in Markdown. A type in a signature would repeat what the text states, and few of the
# names in it have a page.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_use_rtype = False

linkcheck_anchors = False
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)\b.*"]
linkcheck_timeout = 20


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the navigation to the index: each section's list of pages, so that a page is listed once."""
    if name != "index":
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages = re.findall(r"^(?:\*|\d+\.) \[[^\]]+\]\(([\w/-]+)\.md\)", text, re.MULTILINE)
        if pages:
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def undo_type(*received: Any) -> None:
    """Restore the first words of an attribute's docstring: napoleon takes those before a colon for its type."""
    _app, what, _name, _obj, _options, lines = received
    types = [line for line in lines if line.startswith(":type: ")]
    if what in {"attribute", "data", "property"} and types:
        lines.remove(types[0])
        lines[0] = f"{types[0].removeprefix(':type: ')}: {lines[0]}"


def setup(app: Sphinx) -> None:
    """Connect the functions above, and name a language that Pygments does not know."""
    app.add_lexer("crontab", TextLexer)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", undo_type, priority=600)  # after napoleon
