"""Django's admin for timeouts and policies.

`pages` shows the timeouts and the policies. The list of timeouts reads one window of the ledger (`changelist`,
`filters`), and never counts the table or loads the objects: with a million rows both take seconds, and rows whose
object, model or policy is gone must be shown too. `actions` runs operations after a confirmation. `mixins` is for the
admin of your own models.
"""

from django_delayq.admin.mixins import LockingAdminMixin, TimeoutAdminMixin, TimeoutInline
from django_delayq.admin.pages import PolicyChangeAdmin, PolicyControlAdmin, TimeoutAdmin

__all__ = ["LockingAdminMixin", "PolicyChangeAdmin", "PolicyControlAdmin"]
__all__ += ["TimeoutAdmin", "TimeoutAdminMixin", "TimeoutInline"]
