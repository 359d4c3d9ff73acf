"""Install the built wheel beside each supported Python and Django, and use it there: `make matrix`.

    python tests/servers.py run --only redis -- python tools/matrix.py               every combination
    python tests/servers.py run --only redis -- python tools/matrix.py 3.12 6.0      names with all of these words

Each combination has a virtual environment of its own, without the checkout. While it is empty, each extra of
`pyproject.toml` is resolved in it, and must pull what it names and nothing else. Then the project
`tests/beside/acceptance` runs in it twice, and every warning is an error: without Redis after a plain installation, and
with Redis and all extras.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if __package__ in (None, ""):  # run as a script, from this folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.newest import find_version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "tests" / "beside" / "acceptance"
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = METADATA["optional-dependencies"]
PLAIN = "without extras"
COMPILED = "mysql"
"""Its driver has no wheels for Linux. It is resolved if it could be compiled, but not compiled for each Python."""
CONTRIB = ("celery", "rq", "django_tasks", "opentelemetry", "prometheus", "rest_framework.urls", "sentry")
NEEDS = {"6.0": "3.12", "6.1": "3.12"}
"""The oldest Python of each Django that does not support every Python above."""


@dataclass(frozen=True)
class Combination:
    """Releases to install side by side; `lowest`: of every requirement the lowest release that it allows."""

    python: str
    django: str
    lowest: bool = False

    @property
    def name(self) -> str:
        return f"Python {self.python}, Django {self.django}{', lowest' if self.lowest else ''}"


def combinations() -> list[Combination]:
    """Return those that the classifiers of the project promise, and the lowest releases on the oldest Python."""
    pythons, djangos = (
        [line.rpartition(" ")[2] for line in METADATA["classifiers"] if re.search(what, line)]
        for what in (r"Python :: 3\.", r"Django :: \d")
    )
    fitting = [
        Combination(python, django)
        for python in pythons
        for django in djangos
        if _numbers(python) >= _numbers(NEEDS.get(django, python))
    ]
    return [Combination(pythons[0], djangos[0], lowest=True), *fitting]


def build(directory: Path, checkout: Path = ROOT) -> Path:
    """Build the wheel of `checkout` in the empty `directory`. Raises CalledProcessError."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(checkout)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def try_out(combination: Combination, python: str, wheel: Path, directory: Path) -> None:
    """Install `wheel` in a new environment in `directory`, and run the project there.

    Raises:
        CalledProcessError: a command failed.
        ValueError: an extra pulls other packages than it names.
    """
    home = directory / "venv"
    inside = str(home / "bin" / "python")
    subprocess.run([python, "-m", "venv", "--without-pip", str(home)], check=True)
    constraints = directory / "constraints.txt"
    constraints.write_text("\n".join(_constraints(combination, wheel)))
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "-qq", "--constraint", str(constraints)]
    check_extras([*pip, "--dry-run", "--report", "-"], wheel)
    shutil.copytree(PROJECT, directory / "acceptance", ignore=shutil.ignore_patterns("__pycache__"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DJANGO"))}
    common = {**clean, "PYTHONWARNINGS": "error", "PYTHONPATH": str(directory)}
    with_extras = {
        "ACCEPTANCE_CONTRIB": " ".join(CONTRIB),
        "ACCEPTANCE_REDIS": os.environ["DELAYQ_TEST_REDIS_URL"],
        "ACCEPTANCE_PREFIX": f"acceptance-{uuid.uuid4().hex}",
    }
    for extras, own in (("", {}), (f"[{','.join(EXTRAS.keys() - {COMPILED})}]", with_extras)):
        subprocess.run([*pip, f"{wheel}{extras}"], check=True)
        subprocess.run([sys.executable, "-m", "pip", "--python", inside, "check"], check=True)
        folder = directory / ("with-extras" if extras else "plain")
        folder.mkdir()
        subprocess.run([inside, "-m", "acceptance"], cwd=folder, env=common | own, check=True)


def check_extras(pip: Sequence[str], wheel: Path) -> None:
    """Print what each extra pulls beside a plain installation. Raises ValueError if that is not what it names."""
    plain: set[str] = set()
    for extra, lines in {PLAIN: [], **EXTRAS}.items():
        if extra == COMPILED and not _can_compile():
            print(f"{extra}: left out, compiling its driver needs pkg-config and libmariadb-dev", flush=True)
            continue
        command = [*pip, str(wheel) if extra == PLAIN else f"{wheel}[{extra}]"]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        packages: dict[str, list[Requirement]] = {
            canonicalize_name(one["metadata"]["name"]): list(map(Requirement, one["metadata"].get("requires_dist", [])))
            for one in report["install"]
        }
        pulled = packages.keys() - {METADATA["name"]}
        named = needed(map(Requirement, [*METADATA["dependencies"], *lines]), packages, report["environment"])
        if pulled != named:
            raise ValueError(f"{extra}: {sorted(pulled - named)} not named, {sorted(named - pulled)} missing")
        print(f"{extra}: {', '.join(sorted(pulled - plain))}", flush=True)
        plain = plain or pulled


def needed(
    requirements: Iterable[Requirement], packages: Mapping[str, Sequence[Requirement]], environment: Mapping[str, str]
) -> set[str]:
    """Return the names of `requirements`, and of what these require in turn, by the metadata in `packages`."""
    found = set()
    waiting = [(one, "") for one in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for asked in {"", *requirement.extras}:
            if (name, asked) not in found:
                found.add((name, asked))
                waiting += [(one, asked) for one in packages.get(name, ())]
    return {name for name, _ in found}


def _can_compile() -> bool:
    libraries = ("mysqlclient", "mariadb", "libmariadb", "perconaserverclient")  # for which mysqlclient asks
    return bool(shutil.which("pkg-config")) and any(
        subprocess.run(["pkg-config", "--exists", library], check=False).returncode == 0 for library in libraries
    )


def _constraints(combination: Combination, wheel: Path) -> list[str]:
    """Return lines for pip: this release of Django, and with `lowest` each lower bound in the wheel's metadata."""
    if not combination.lowest:
        return [f"Django=={combination.django}.*"]
    requirements = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*?>=([\d.]+)", metadata_of(wheel), re.MULTILINE)
    return sorted({f"{name}=={bound}" for name, bound in requirements})


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main(words: Sequence[str]) -> int:
    """Try out the combinations whose names contain all `words`; print a line for each, and return the exit code."""
    wanted = [one for one in combinations() if all(word in one.name for word in words)]
    lines: list[str] = []
    failed = not wanted
    with tempfile.TemporaryDirectory(prefix="delayq-matrix-") as directory:
        wheel = build(Path(directory))
        for number, combination in enumerate(wanted):
            python = find_version(combination.python)
            began = time.monotonic()
            result = "left out"
            failed |= python is None and os.environ.get("CI") == "true"
            if python is not None:
                print(f"\n--- {combination.name} ({python})", flush=True)
                own = Path(directory, str(number))
                own.mkdir()
                try:
                    try_out(combination, python, wheel, own)
                    result = "passed"
                except (subprocess.CalledProcessError, ValueError) as error:
                    print(error, flush=True)
                    result, failed = "FAILED", True
                shutil.rmtree(own)
            lines.append(f"{result:9} {combination.name} ({time.monotonic() - began:.0f} s)")
    print("\n=== matrix", *(lines or [f"no combination is named {' '.join(words)}"]), sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
