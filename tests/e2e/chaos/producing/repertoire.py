"""All operations with their weights."""

from __future__ import annotations

from tests.e2e.chaos.producing import by_hand, by_operators, in_bulk, orders
from tests.e2e.chaos.producing.operation import Deed

DEEDS: dict[Deed, float] = {
    orders.place: 12,
    orders.place_and_change_ones_mind: 1,
    orders.place_after_a_savepoint: 2,
    orders.place_and_commit_late: 0.4,
    orders.place_outside_a_transaction: 1,
    orders.place_unseen: 0.5,
    orders.place_in_bulk: 2,
    orders.postpone: 3,
    orders.reopen: 2,
    orders.remove: 1,
    orders.pay: 5,
    orders.pay_among_other_things: 3,
    orders.pay_in_time: 3,
    orders.pay_and_change_ones_mind: 1,
    orders.pay_conditionally: 3,
    by_hand.remind: 8,
    by_hand.remind_unless_reminded: 3,
    by_hand.remind_after_a_savepoint: 2,
    by_hand.remind_and_change_ones_mind: 1,
    by_hand.falter: 3,
    by_hand.send_outside: 2,
    by_hand.reschedule: 4,
    by_hand.extend: 4,
    by_hand.cancel: 5,
    by_hand.cancel_and_change_ones_mind: 1,
    in_bulk.schedule_many: 4,
    in_bulk.cancel_many: 1,
    in_bulk.extend_many: 2,
    in_bulk.reschedule_many: 2,
    in_bulk.cancel_by_operator: 0.5,
    in_bulk.postpone_by_operator: 1,
    in_bulk.fire_now_by_operator: 1,
    by_operators.chill: 3,
    by_operators.decay: 3,
    by_operators.pause: 1,
    by_operators.resume_paused: 0.5,
    by_operators.hold: 1,
    by_operators.resume_held: 1.5,
    by_operators.change_delay: 1,
}
