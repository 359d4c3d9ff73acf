"""What operators do, in the same way from the admin, by REST and by command.

| on timeouts | on policies |
| --- | --- |
| `cancel`, `fire_now`, `postpone`, `retry` | `pause`, `hold`, `resume`, `change_delay` with `preview_delay` |
| | `late`, `brake`, `shadow` |

Each takes the actor `by` (`admin:alice`) and a `reason` for people, and stores both: in the row's history or as a
`PolicyChange`. An empty `by` is a ValueError. Those on policies take the policy or its label, and raise UnknownPolicy
if it is not declared.
"""

from django_delayq.operations.guards import brake, late, shadow
from django_delayq.operations.policies import (
    DelayPreview,
    PolicyConflict,
    change_delay,
    hold,
    pause,
    preview_delay,
    resume,
)
from django_delayq.operations.replan import continue_moves
from django_delayq.operations.timeouts import Refusal, Refused, Result, cancel, fire_now, postpone, retry

__all__ = [
    "DelayPreview",
    "PolicyConflict",
    "Refusal",
    "Refused",
    "Result",
    "brake",
    "cancel",
    "change_delay",
    "continue_moves",
    "fire_now",
    "hold",
    "late",
    "pause",
    "postpone",
    "preview_delay",
    "resume",
    "retry",
    "shadow",
]
