"""The wheel contains every file and works without the checkout, and the version is the same everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.version import Version

import django_delayq
from tools import matrix
from tools.newest import find_version

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "django_delayq"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

USE_INSTALLED = """
import sys, pathlib, django_delayq
from importlib.resources import files
assert pathlib.Path(django_delayq.__file__).is_relative_to(sys.argv[1]), django_delayq.__file__
from django_delayq.engine.scripts import read_texts
assert "reserve" in read_texts()
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
    return matrix.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Metadata:
    """Return what an index would check and show."""
    return Metadata.from_email(matrix.metadata_of(wheel), validate=True)


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


@pytest.mark.timeout(300)
def test_the_wheel_works_beside_the_lowest_releases_that_it_allows(wheel: Path, tmp_path: Path, redis_url: str) -> None:
    """The stage `newest` of the suite runs on the newest ones, and `make matrix` tries out all combinations."""
    combination = matrix.combinations()[0]
    python = find_version(combination.python)
    if python is None:
        pytest.skip(f"there is no Python {combination.python}")
    matrix.try_out(combination, python, wheel, tmp_path)


def test_a_plain_installation_needs_only_django_and_the_clients_of_redis(metadata: Metadata) -> None:
    plain = [one for one in metadata.requires_dist or [] if one.marker is None or "extra" not in str(one.marker)]
    assert {one.name for one in plain} == {"django", "redis", "django-redis", "typing-extensions"}
    assert not any(one.extras for one in plain)


def test_the_page_of_an_index_has_links_that_lead_somewhere(metadata: Metadata) -> None:
    assert metadata.description_content_type == "text/markdown"
    relative = re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata.description or "")
    assert relative == []
    assert set(metadata.project_urls or {}) == {"Homepage", "Documentation", "Changelog", "Issues", "Security"}


def test_the_source_distribution_holds_what_its_tests_need(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    rooms = ("django_delayq/", "tests/", "tools/", "docs/", "example_project/", "benchmarks/")
    assert {name for name in tracked if name.startswith(rooms)} <= packed
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "Makefile", "pyproject.toml"} <= packed


def test_project_file_package_and_changelog_name_one_version() -> None:
    versions = re.findall(r"^## \[?(\d[^\]\s]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == django_delayq.__version__
    assert Version(django_delayq.__version__).base_version == versions[0]


def test_a_state_between_releases_has_the_version_of_none() -> None:
    """With the same version pip installs nothing, and reports success. A source distribution has no tags."""
    version, has_tags = Version(django_delayq.__version__), (ROOT / ".git").exists()
    assert not has_tags or version.is_devrelease is (f"v{version}" not in tags("--points-at", "HEAD"))
    assert [tag for tag in tags("--merged", "HEAD") if Version(tag) > version] == []


def tags(*which: str) -> list[str]:
    """Return the tags of versions; none where there is no repository."""
    command = ["git", "tag", *which, "--list", "v*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def test_the_classifiers_name_the_pythons_and_djangos_that_the_requirements_allow() -> None:
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)]
    djangos = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Django :: \d", line)]
    (django,) = (line for line in PROJECT["dependencies"] if line.startswith("Django"))
    major, minor = djangos[-1].split(".")
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert django == f"Django>={djangos[0]},<{major}.{int(minor) + 1}"
