"""The wheel contains every file and works without the checkout, and each state has a version of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.version import Version

from tests.docs.pages import read
from tools import matrix

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "django_delayq"
pytestmark = pytest.mark.slow
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


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Clone the last commit. A source distribution has none."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a repository")
    git(tmp_path, "clone", "-q", "--shared", str(ROOT), "clone")
    return tmp_path / "clone"


def git(folder: Path, *arguments: str) -> str:
    """Run a command of git in `folder`; return what it prints."""
    author = [word for name in ("name", "email") for word in ("-c", f"user.{name}=tests")]
    return subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path) -> None:
    git(folder, "commit", "-q", "--all", "--allow-empty", "--message", "A further state")


def version_of(folder: Path) -> str:
    """Return the version that a build of this checkout, or unpacked distribution, has."""
    command = [sys.executable, "-m", "hatchling", "version"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


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


def test_a_plain_installation_needs_only_django_and_the_clients_of_redis(metadata: Metadata) -> None:
    plain = [one for one in metadata.requires_dist or [] if one.marker is None or "extra" not in str(one.marker)]
    assert {one.name for one in plain} == {"django", "redis", "django-redis", "typing-extensions"}
    assert not any(one.extras for one in plain)


def test_the_source_distribution_holds_what_its_tests_need(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert f"{version_of(tmp_path / built.name.removesuffix('.tar.gz'))}.tar.gz" in built.name, "without the repository"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    rooms = (".github/", "django_delayq/", "tests/", "tools/", "docs/", "example_project/", "benchmarks/")
    assert {name for name in tracked if name.startswith(rooms)} <= packed
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "SUPPORT.md", "Makefile", "pyproject.toml"} <= packed


def test_a_commit_has_a_version_of_its_own_before_that_of_the_changelog_and_a_tag_is_a_release(clone: Path) -> None:
    (heading, *_) = re.findall(r"^## \[?(\d[^\]\s]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert Version(version_of(clone)).base_version == heading
    commit(clone)
    coming = Version(version_of(clone))
    assert coming.is_devrelease
    assert git(clone, "rev-parse", "HEAD").startswith(str(coming.local).removeprefix("g"))
    git(clone, "tag", f"v{coming.base_version}")
    assert version_of(clone) == coming.base_version
    commit(clone)
    assert Version(version_of(clone)) > Version(coming.base_version)


def test_the_commands_of_the_readme_and_those_for_the_repository_install_this_code(clone: Path, tmp_path: Path) -> None:
    """Git reads a clone in place of the address on the internet; pip uses what is installed beside the tests."""
    first, others = (
        [line for block in read(page).blocks for _, line in block.commands()]
        for page in (ROOT / "README.md", ROOT / "docs" / "how-to" / "install.md")
    )
    lines = [line for line in first if line.startswith(("git", "pip"))]
    lines += [line for line in others if line.startswith('pip install "django-delayq @ git+')]
    assert len(lines) == 3
    homepage = PROJECT["urls"]["Homepage"]
    replaced = {"COUNT": "1", "KEY_0": f"url.file://{clone}.insteadOf", "VALUE_0": homepage}
    environment = {**os.environ, **{f"GIT_CONFIG_{name}": value for name, value in replaced.items()}}
    for number, line in enumerate(lines):
        words = shlex.split(line)
        if words[0] == "pip":
            offline = ["--no-index", "--no-deps", "--no-build-isolation", f"--target={tmp_path / str(number)}"]
            words = [sys.executable, "-m", *words, "-qq", *offline]
        subprocess.run(words, cwd=tmp_path, env=environment, check=True)
        installed = tmp_path / str(number) / "django_delayq" / "py.typed"
        assert installed.exists() is ("pip" in words)


def test_the_classifiers_name_the_pythons_and_djangos_that_the_requirements_allow() -> None:
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)]
    djangos = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Django :: \d", line)]
    (django,) = (line for line in PROJECT["dependencies"] if line.startswith("Django"))
    major, minor = djangos[-1].split(".")
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert django == f"Django>={djangos[0]},<{major}.{int(minor) + 1}"
