"""The wheel contains every file and works without the checkout, and the version is the same everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import django_delayq

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "django_delayq"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

USE_INSTALLED = """
import sys, pathlib, django_delayq
from importlib.resources import files
assert pathlib.Path(django_delayq.__file__).is_relative_to(sys.argv[1]), django_delayq.__file__
from django_delayq.engine.scripts import packaged_scripts
packaged_scripts()
import django; django.setup()
from django.core.management import call_command
call_command("check")
"""

BARE_SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django_delayq"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = directory.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    files = {
        str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == files
    assert any(name.endswith(".lua") for name in packed)
    assert "django_delayq/py.typed" in packed


def test_the_wheel_works_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "bare.py").write_text(BARE_SETTINGS)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{tmp_path}",
        "DJANGO_SETTINGS_MODULE": "bare",
    }
    command = [sys.executable, "-c", USE_INSTALLED, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_project_file_package_and_changelog_name_one_version() -> None:
    versions = re.findall(r"^## \[?(\d[^\]\s]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == django_delayq.__version__ == versions[0]


def test_the_classifiers_name_the_pythons_and_djangos_that_the_requirements_allow() -> None:
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)]
    djangos = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Django :: \d", line)]
    (django,) = (line for line in PROJECT["dependencies"] if line.startswith("Django"))
    major, minor = djangos[-1].split(".")
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert django == f"Django>={djangos[0]},<{major}.{int(minor) + 1}"
