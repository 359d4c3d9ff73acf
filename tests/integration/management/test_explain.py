"""`delayq_explain`: the story of an object's timeouts, by its key or by what people call it, and of what is gone."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from django.core.management import CommandError
from django.utils import timezone

from django_delayq import cancel_timeout, get_policies, operations, schedule_timeout
from django_delayq.models import Timeout, WorkerSeen
from django_delayq.scheduling import story
from tests.integration.management.conftest import REMIND, Do, a_worker
from tests.integration.operations.conftest import BY, as_if, pending
from tests.support.typed import Declare, Patch
from tests.testapp.models import ExpressOrder, Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]


def stories(text: str) -> dict[str, list[str]]:
    """Return the lines of each story by its title."""
    parts = [part.splitlines() for part in text.split("\n\n")[1:]]
    return {title: [line.strip() for line in lines] for title, *lines in parts}


def test_every_policy_and_key_of_an_object_is_explained(do: Do) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    schedule_timeout(order, "remind", hours=1, key="second")
    cancel_timeout(order, "remind", key="second", reason="paid by phone")
    other = pending(Order.objects.create())
    report = do("delayq_explain", "testapp.order", str(order.pk)).out
    assert report.startswith("Times are in the zone America/Sao_Paulo.\n")
    found = stories(report)
    assert "It is due at" in found[f"testapp.order.cancel_unpaid of {order.pk}"][-1]
    assert "paid by phone" in found[f"{REMIND} of {order.pk} (second)"][1]
    assert found[f"testapp.order.linger of {order.pk}"] == ["Nothing is pending: this policy is scheduled by hand."]
    assert f"{REMIND} of {order.pk}" not in found, "it has a round with a key"
    assert not any(title.endswith(f"of {other.object_id}") for title in found)


def test_of_very_many_rounds_the_newest_are_shown(do: Do, monkeypatch: Patch) -> None:
    monkeypatch.setattr(story, "MAX_ROUNDS", 2)
    order = Order.objects.create()
    for _ in range(3):
        pending(order)
        cancel_timeout(order, "remind")
    arguments = ("delayq_explain", "testapp.order", str(order.pk), "--policy", REMIND)
    lines = stories(do(*arguments).out)[f"{REMIND} of {order.pk}"]
    assert (lines[0], len(lines)) == ("Only the newest 2 rounds are shown.", 6)
    one = do("delayq_explain", "--id", str(Timeout.objects.earliest("id").pk)).out
    assert len(stories(one)[f"{REMIND} of {order.pk}"]) == 3


def test_timeouts_and_objects_without_them_are_found_by_their_numbers(do: Do, declare: Declare) -> None:
    policy = declare(Order, name="noted", search=("note", "customer__name"), aliases=("remarked",))
    wanted, other = (Order.objects.create(note=note) for note in ("N-4", "N-5"))
    pending(wanted, "noted"), cancel_timeout(wanted, "noted")
    row = pending(wanted, "noted")
    pending(wanted, "remind"), pending(other, "noted")

    def search(*arguments: str) -> dict[str, list[str]]:
        return stories(do("delayq_explain", "--search", *arguments).out)

    noted, reminded = f"testapp.order.noted of {wanted.pk}: N-4", f"{REMIND} of {wanted.pk}: N-4"
    assert [*search("N-4")] == [noted, reminded]
    assert len(search("N-4")[noted]) == 4, "all rounds"
    assert [*search("N-4", "--policy", "remind")] == [reminded]
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.remarked")  # a former name of it
    assert [title.partition(" ")[2] for title in search("N-4", "--policy", policy.label)] == [f"of {wanted.pk}: N-4"]
    old = Order.objects.create(status="unpaid", note="N-6", created_at=timezone.now() - timedelta(days=30))
    assert [*search("N-6")] == [f"{policy.label} of {old.pk}: N-6" for policy in get_policies(Order)]
    (outlook,) = search("N-6")[f"testapp.order.cancel_unpaid of {old.pk}: N-6"]
    assert "delayq_sync --policy testapp.order.cancel_unpaid --backfill" in outlook
    Order.objects.bulk_create(Order(note="same") for _ in range(51))
    with pytest.raises(CommandError, match="finds more than 50 objects"):
        search("same", "--policy", "noted")


def test_a_due_timeout_that_does_not_fire_is_explained(do: Do) -> None:
    row = as_if(pending(Order.objects.create()), "pending", run_at=timezone.now() - timedelta(minutes=5))

    def last() -> str:
        return do("delayq_explain", "--id", str(row.pk)).out.splitlines()[-1]

    assert "It has been due for 5 min" in last() and "No worker is running: nothing fires." in last()
    a_worker(queues=["mail"])
    assert "No worker serves the queue 'default'. Start one: manage.py delayq_worker --queue default" in last()
    a_worker()
    assert "delayq_status and delayq_doctor show what delays them" in last()
    Timeout.objects.update(claimed_until=timezone.now() + timedelta(minutes=1))
    assert "A worker has claimed or deferred it until " in last()
    assert last().endswith("If that worker has died, another one fires it then.")
    WorkerSeen.objects.all().delete()
    assert last().endswith("nothing fires. Start one: manage.py delayq_worker"), "so that none fires it then"
    a_worker()
    operations.pause(REMIND, by=BY, reason="outage")
    assert last().strip() == "Its policy is paused by admin:alice until an operator resumes it. (outage)"
    Timeout.objects.update(policy="testapp.order.forgotten")
    assert "Its policy is not declared" in last()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Which timeouts"),
        (["testapp.order"], "Which object"),
        (["A-2026-0001"], "Did you mean --search A-2026-0001"),
        (["testapp.ordr", "1"], "no model"),
        (["--id", "1", "--policy", "remind"], "does not go with it"),
        (["testapp.order", "one"], "one is not a key of Order"),
        (["testapp.order", "123456"], "no Order 123456, and no timeout of it"),
        (["testapp.order", "1", "--id", "1"], "Give only one of"),
        (["--search", "nothing"], "Neither a timeout nor an object with a policy is found by 'nothing'"),
        (["--id", "123456"], "There is no timeout 123456"),
        (["testapp.order", "{pk}", "--policy", "remnd"], "Did you mean"),
    ],
)
def test_a_wrong_question_is_refused(do: Do, arguments: list[str], words: str) -> None:
    pk = Order.objects.create().pk
    with pytest.raises(CommandError, match=words):
        do("delayq_explain", *(each.format(pk=pk) for each in arguments))


def test_an_object_is_explained_by_its_number_unless_that_is_a_key(do: Do, declare: Declare) -> None:
    declare(Order, name="noted", search="note")
    order, express = Order.objects.create(note="A-2026-0050"), ExpressOrder.objects.create(note="A-7")
    pending(order), pending(Order.objects.create(note="A-2026-0019")), pending(express)
    answer = do("delayq_explain", "testapp.order", "A-2026-0050", "--policy", "remind")
    assert [*stories(answer.out)] == [f"{REMIND} of {order.pk}: A-2026-0050"] and not answer.err
    (*_, value) = json.loads(do("delayq_explain", "testapp.order", "A-2026-0050", "--json").out)
    assert value["name"] == "A-2026-0050"
    found = stories(do("delayq_explain", "testapp.expressorder", "A-7", "--policy", REMIND).out)
    assert [*found] == [f"{REMIND} of {express.pk}: A-7"], "a child by the number of its parent"
    other = Order.objects.create(note=str(order.pk))
    both = f"{order.pk} is a primary key. As a field in search= it also finds the order {other.pk}."
    assert do("delayq_explain", "testapp.order", str(order.pk)).err.strip() == both
    head, first, *_others = do("delayq_list").out.splitlines()
    assert head.split()[:4] == ["id", "policy", "object", "name"] and first.split()[3] == "A-2026-0050"
