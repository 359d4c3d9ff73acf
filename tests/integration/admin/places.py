"""The names of the pages, and the labels of some policies."""

from __future__ import annotations

LIST = "admin:django_delayq_timeout_changelist"
DETAIL = "admin:django_delayq_timeout_change"
OPERATION = "admin:django_delayq_timeout_operate"
POLICIES = "admin:django_delayq_policycontrol_changelist"
OPERATE = "admin:django_delayq_policycontrol_operate"
SELECTED = "admin:django_delayq_policycontrol_operate_selected"
REMIND, LINGER, UNPAID = "testapp.order.remind", "testapp.order.linger", "testapp.order.cancel_unpaid"
