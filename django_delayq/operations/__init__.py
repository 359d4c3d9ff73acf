"""What operators do, in the same way from the admin, by REST and by command.

On timeouts: `cancel`, `fire_now`, `postpone`, `change_deadline`, `replan`, `hold_timeout`, `pause_timeout`,
`resume_timeout`, `retry`, `refire` and `erase`. On policies: `pause`, `hold`, `resume`, `change_delay` with
`preview_delay`, `late`, `brake` and `shadow`.

`related_timeouts` returns the timeouts of a customer, merchant or team, to operate on them. `export` yields all that
the ledger has of timeouts.

`advance_clock`, `set_clock` and `reset_clock` let time pass in a staging installation.

`retire` cancels the timeouts of a policy that is not declared any more. `adopt` makes a copied ledger one's own.

Each takes the actor `by` (`admin:alice`) and a `reason` for people, and stores both: in the row's history or as a
`PolicyChange`. An empty `by` is a ValueError. Those on policies take the policy or its label, and raise UnknownPolicy
if it is not declared.
"""

from django_delayq.operations.changes import PolicyConflict, continue_moves
from django_delayq.operations.personal_data import erase, export
from django_delayq.operations.policies import brake, change_delay, hold, late, pause, resume, shadow
from django_delayq.operations.previews import DelayPreview, preview_delay
from django_delayq.operations.replanning import replan
from django_delayq.operations.runner import Refusal, Refused, Result
from django_delayq.operations.selection import related_timeouts
from django_delayq.operations.time_travel import Passed, advance_clock, reset_clock, set_clock
from django_delayq.operations.timeouts import (
    Adoption,
    adopt,
    cancel,
    change_deadline,
    fire_now,
    hold_timeout,
    pause_timeout,
    postpone,
    refire,
    resume_timeout,
    retire,
    retry,
)

__all__ = ["Adoption", "DelayPreview", "Passed", "PolicyConflict", "Refusal", "Refused", "Result"]
__all__ += ["adopt", "cancel", "change_deadline", "fire_now", "postpone", "refire", "replan", "retire", "retry"]
__all__ += ["erase", "export", "hold_timeout", "pause_timeout", "related_timeouts", "resume_timeout"]
__all__ += ["advance_clock", "reset_clock", "set_clock"]
__all__ += ["brake", "change_delay", "continue_moves", "hold", "late", "pause", "preview_delay", "resume", "shadow"]
