"""The list of faults of the mutation gate fits the sources, so that `make mutants` tries all of them."""

from __future__ import annotations

from tools.mutants import ROOT, read_faults


def test_each_fault_has_one_place_in_the_sources_and_is_valid_python() -> None:
    assert [complaint for fault in read_faults() if (complaint := fault.complaint())] == []


def test_each_room_has_its_faults_and_its_tests() -> None:
    faults = read_faults()
    assert len(faults) >= 80
    assert {fault.room for fault in faults} == {
        *("ledger", "scheduling", "arming", "firing", "recovery", "worker", "operations", "spans", "data", "asking"),
        *("answers", "webhooks", "steps", "reports", "what-if"),
    }
    missing = {path for fault in faults for path in fault.tests if not (ROOT / path).exists()}
    assert missing == set()
