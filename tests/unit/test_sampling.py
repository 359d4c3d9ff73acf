"""A sample repeats each test within days, and what depends on the database each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import sampling

NAMES = [f"tests/integration/admin/test_list.py::test_it[{number}]" for number in range(3000)]


def test_a_sample_has_about_one_in_so_many_and_is_the_same_all_day() -> None:
    first = sampling.sample(NAMES, "3", "2026-11-27")
    assert 850 < len(first) < 1150
    assert sampling.sample(reversed(NAMES), "3", "2026-11-27") == first


def test_within_weeks_each_test_has_been_in_one() -> None:
    seen = set().union(*(sampling.sample(NAMES, "3", f"2026-11-{day:02}") for day in range(1, 31)))
    assert seen == set(NAMES)


def test_what_depends_on_the_database_and_what_a_guarantee_names_is_always_in_it() -> None:
    always = ["tests/e2e/races/test_paying.py::test_it", "tests/integration/ledger/test_claims.py::test_it[x]"]
    always.append("tests/integration/ledger/test_outbox.py::test_a_transaction_that_rolls_back_pushes_nothing")
    always.append("tests/e2e/crashes/test_kills.py::test_killed_at_any_step_it_fires_once[begun]")
    assert sampling.sample(always, str(10**6)) == set(always)
    assert sampling.sample(always, str(10**6), always=()) == set(always[2:])
    assert sampling.sample(always, str(10**6), always=(), only_threads=True) == set(always[2:3])


def test_tests_with_processes_run_on_one_of_three_databases() -> None:
    names = [f"tests/e2e/crashes/test_steps.py::test_it[{number}]" for number in range(300)]
    parts = [sampling.sample(names, f"{part}/3") for part in range(3)]
    assert set().union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)


def test_a_test_keeps_one_case_at_least_and_another_one_each_day() -> None:
    names = [f"tests/integration/matrix/test_keys.py::test_it[{number}]" for number in range(30)]
    few = [f"tests/integration/matrix/test_keys.py::test_that[{number}]" for number in range(sampling.MANY)]
    pages = [f"tests/docs/test_python.py::test_a_page[{number}]" for number in range(30)]
    kept = sampling.sample_cases([*names, *few, *pages], "3")
    assert {*few, *pages} <= kept
    assert 0 < len(kept & set(names)) < 20
    assert len(sampling.sample_cases(names, str(10**9))) == 1
    days = [sampling.sample_cases(names, "3", f"2026-11-{day:02}") for day in range(1, 31)]
    assert set().union(*days) == set(names)


def test_each_case_of_many_runs_on_one_of_three_databases() -> None:
    names = [f"tests/integration/matrix/test_keys.py::test_it[{number}]" for number in range(300)]
    parts = [sampling.sample_cases(names, f"{part}/3") for part in range(3)]
    assert set().union(*parts) == set(names)
    assert len(names) <= sum(map(len, parts)) <= len(names) + 3


def test_the_modules_of_the_list_exist() -> None:
    missing = [name for name in (*sampling.DIALECT, *sampling.SQLITE) if not [*sampling.ROOT.glob(f"{name}*")]]
    assert [name for name in missing if not (sampling.ROOT / name).is_dir()] == []


def test_a_run_with_a_sample_names_what_is_left_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--collect-only", str(Path(__file__))]
    environment = {"DELAYQ_TEST_SAMPLE": "2", "PYTHONPATH": str(sampling.ROOT), "HOME": str(tmp_path)}
    found = subprocess.run(command, cwd=sampling.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "deselected" in found.stdout.splitlines()[-1], found.stdout + found.stderr
