"""Django's admin: who waits for what until when, why, and the hands that may change it.

In the order of use: the list (`listing`) reads one window of the ledger (`reading`), narrowed by `filters`, `dates` and
`searching`; one row's page tells its story (`telling`). `inlines` and `mixins` bring both to an object's own page.
Lists neither load the objects that timeouts are about nor count the table: with a million rows both would take
seconds, and a row whose object, kind of object or policy is gone must show all the same.
"""

from __future__ import annotations

from django_delayq.admin.inlines import TimeoutInline
from django_delayq.admin.listing import TimeoutAdmin
from django_delayq.admin.mixins import TimeoutAdminMixin
from django_delayq.admin.policies import PolicyChangeAdmin, PolicyControlAdmin

__all__ = ["PolicyChangeAdmin", "PolicyControlAdmin", "TimeoutAdmin", "TimeoutAdminMixin", "TimeoutInline"]
