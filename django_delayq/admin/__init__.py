"""Django's admin for timeouts and policies.

`timeouts` shows the ledger. Its list reads one window of it (`changelist`, `filters`), and never counts the table or
loads the objects: with a million rows both take seconds, and rows whose object, model or policy is gone must be shown
too. `policies` shows the policies. `actions` runs operations after a confirmation. `mixins` is for the admin of your
own models.
"""

from django_delayq.admin.mixins import TimeoutAdminMixin, TimeoutInline
from django_delayq.admin.policies import PolicyChangeAdmin, PolicyControlAdmin
from django_delayq.admin.timeouts import TimeoutAdmin

__all__ = ["PolicyChangeAdmin", "PolicyControlAdmin", "TimeoutAdmin", "TimeoutAdminMixin", "TimeoutInline"]
