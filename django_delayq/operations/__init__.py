"""What operators do, from the admin, by REST or by command alike: to timeouts, and to policies as a whole.

| on timeouts | on policies |
| --- | --- |
| `cancel`, `fire_now`, `postpone`, `retry` | `pause`, `hold`, `resume`, `change_delay` with `preview_delay` |

Every one takes `by` (`admin:alice`) and a reason, and both are kept: in the row's history, or as a `PolicyChange`.
"""

from django_delayq.operations.delays import DelayPreview, change_delay, preview_delay
from django_delayq.operations.moves import go_on_with_moves
from django_delayq.operations.results import Refusal, Refused, Steered
from django_delayq.operations.stops import PolicyConflict, hold, pause, resume
from django_delayq.operations.verbs import cancel, fire_now, postpone, retry

__all__ = [
    "DelayPreview",
    "PolicyConflict",
    "Refusal",
    "Refused",
    "Steered",
    "cancel",
    "change_delay",
    "fire_now",
    "go_on_with_moves",
    "hold",
    "pause",
    "postpone",
    "preview_delay",
    "resume",
    "retry",
]
