"""Random commands that meet random faults, beside the model: what Redis holds is always exactly what was done.

The model learns what the network did, and not what the caller heard: a lost reply may hide a number, never an effect.
Only `reserve` and `extend` have a cost then: the entries are under a lease without an owner until it expires.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_delayq.exceptions import EngineUnavailable
from tests.engine.fault_proxy import Fault, FaultProxy
from tests.engine.lines import OneLine, lease_of
from tests.engine.model import LEASE_MS, Held, QueueMachine
from tests.engine.redis_process import RedisProcess
from tests.engine.test_model import COMMON, PROFILE
from tests.engine.virtual import VirtualQueue, virtual_texts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

HASTY, PATIENT = 0.1, 20.0
PROFILES = {
    "ci": settings(max_examples=120, stateful_step_count=30, **COMMON),
    "nightly": settings(max_examples=5_000, stateful_step_count=60, **COMMON),
}
RESETS = [fault for fault in Fault if not fault.is_silent]


class ReplyLost(Exception):
    """The command ran, and its reply was lost."""


class Anything(int):
    """The number in a lost reply, which equals every number."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class ShakenQueue:
    """A queue whose next command may meet a fault, and is then sent again if it did not run."""

    def __init__(self, proxy: FaultProxy, virtual: VirtualQueue, patient: redis.Redis, hasty: redis.Redis) -> None:
        self.fault: Fault | None = None
        self._proxy = proxy
        self._patient, self._hasty = virtual.through(patient), virtual.through(hasty)
        self._hasty_client = hasty
        self.stats, self.peek = virtual.queue.stats, virtual.queue.peek

    def ensure(self, *args: Any) -> int:
        return self._counted("ensure", *args)

    def reschedule(self, *args: Any) -> int:
        return self._counted("reschedule", *args)

    def remove(self, *args: Any) -> int:
        return self._counted("remove", *args)

    def acknowledge(self, *args: Any) -> int:
        return self._counted("acknowledge", *args)

    def release(self, *args: Any) -> int:
        return self._counted("release", *args)

    def reserve(self, *args: Any) -> Any:
        return self._call("reserve", *args)

    def extend(self, *args: Any) -> Any:
        return self._call("extend", *args)

    def _counted(self, name: str, *args: Any) -> int:
        try:
            return int(self._call(name, *args))
        except ReplyLost:
            return Anything()

    def _call(self, name: str, *args: Any) -> Any:
        if name in {"acknowledge", "release"} and args[1] is not None:
            ids = {item if name == "acknowledge" else item[0] for item in args[1]}
            if ids.isdisjoint(args[0].lines):
                return getattr(self._patient, name)(*args)  # sends nothing that a fault could meet
        fault, self.fault = self.fault, None
        if fault is not None:
            self._meet(fault, self._hasty if fault.is_silent else self._patient, name, *args)
            if fault.runs:
                raise ReplyLost
        return getattr(self._patient, name)(*args)

    def _meet(self, fault: Fault, queue: OneLine, name: str, *args: Any) -> None:
        wait_until(self._is_connected)  # the handshake is over, so that only the command itself can be late
        before = self._proxy.met[fault]
        self._proxy.inject(fault, only=b"EVAL")
        with pytest.raises(EngineUnavailable):
            getattr(queue, name)(*args)
        wait_until(lambda: self._proxy.met[fault] > before)

    def _is_connected(self) -> bool:
        try:
            return bool(self._hasty_client.ping())
        except redis.TimeoutError:
            return False


class ShakenMachine(QueueMachine):
    """The machine of the model behind the proxy."""

    proxy: ClassVar[FaultProxy]
    patient: ClassVar[redis.Redis]
    hasty: ClassVar[redis.Redis]

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.queue: Any = ShakenQueue(self.proxy, self.virtual, self.patient, self.hasty)

    @rule(fault=st.sampled_from([*RESETS, *RESETS, *Fault]))
    def the_next_command_meets(self, fault: Fault) -> None:
        self.queue.fault = fault

    forget_scripts = None  # type: ignore[assignment]  # see `shaken`

    @rule(limit=st.sampled_from([1, 2, 3, 1000]), lease_ms=LEASE_MS, looks=st.booleans())
    def reserve(self, limit: int, lease_ms: int, looks: bool) -> None:
        expected = self._reservable()[:limit]
        try:
            super().reserve(limit, lease_ms, looks)
        except ReplyLost:
            self.junk &= self.virtual.members().keys()
            self._hold_unknown({id: self.held[id].deliveries + 1 for id in expected}, lease_ms)

    @rule(data=st.data(), lease_ms=LEASE_MS)
    def extend(self, data: st.DataObject, lease_ms: int) -> None:
        lease = self._any_lease(data)
        mine = {id: held.deliveries for id, held in self.held.items() if lease and held.lease == lease}
        try:
            if lease:
                self._extend(lease, lease_ms)
        except ReplyLost:
            self._hold_unknown(mine, lease_ms)

    def _hold_unknown(self, deliveries: dict[int, int], lease_ms: int) -> None:
        """Note that these ids are under one new lease, whose token only the server knows."""
        if not deliveries:
            return
        scores = {int(id): int(score) for id, score in self.virtual.members().items() if id not in self.junk}
        counted = {id: min(count, 15) for id, count in deliveries.items()}
        (token,) = {scores[id] - count for id, count in counted.items()}
        lease = lease_of(token, ids=counted)
        assert lease not in self.leases
        assert (token >> 10) & (2**42 - 1) == self.now + lease_ms
        for id, count in counted.items():
            self.held[id] = Held(self.now + lease_ms, count, lease)


@pytest.fixture
def shaken(shared_server: RedisProcess, client: redis.Redis) -> Iterator[dict[str, Any]]:
    for text in virtual_texts().values():  # or the lost reply could be that the server does not know the script
        client.script_load(text)
    retry = Retry(NoBackoff(), 0)
    with (
        FaultProxy(shared_server.socket) as proxy,
        redis.Redis(port=proxy.port, socket_timeout=PATIENT, retry=retry) as patient,
        redis.Redis(port=proxy.port, socket_timeout=HASTY, retry=retry) as hasty,
    ):
        yield {"client": client, "proxy": proxy, "patient": patient, "hasty": hasty}


@pytest.mark.timeout(0 if PROFILE == "nightly" else 120)
def test_any_sequence_of_commands_and_faults_leaves_what_the_model_says(shaken: dict[str, Any]) -> None:
    machine = type("Shaken", (ShakenMachine,), shaken)
    run_state_machine_as_test(machine, settings=PROFILES[PROFILE])
    # The silent ones are rare, because each takes its time; `test_every_fault` has every fault for every command.
    assert set(RESETS) <= set(shaken["proxy"].met), "every fault was met"
