"""Permissions and throttling of the views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext_lazy as _
from rest_framework.permissions import BasePermission
from rest_framework.settings import api_settings

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView


class StaffWithPermission(BasePermission):
    """Allow active staff with a permission for the view's action, as in Django's admin.

    The method `permissions_of(action)` of the view returns these permissions, any of which is enough.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        user = request.user
        names = view.permissions_of(getattr(view, "action", None))
        return user.is_active and user.is_staff and any(user.has_perm(f"django_delayq.{name}") for name in names)


class DenyAll(BasePermission):
    """Refuse all users, also superusers, because the project has not set a permission yet."""

    message = _("This view needs permission_classes of your project.")

    def has_permission(self, request: Request, view: APIView) -> bool:
        return False

    def has_object_permission(self, request: Request, view: APIView, obj: Any) -> bool:
        return False


class OptionalScope:
    """Set `throttle_scope` of a view only if `DEFAULT_THROTTLE_RATES` has a rate for it.

    DRF answers 500 for a scope without a rate. A project that throttles its own views by scope need not name ours.
    """

    scope = "delayq"

    @property
    def throttle_scope(self) -> str | None:
        """The scope of this request; None: not limited by scope."""
        return self.scope if self.scope in api_settings.DEFAULT_THROTTLE_RATES else None
