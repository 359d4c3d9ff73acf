"""Who may look, and who may act. Staff with the permission for it, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext_lazy as _
from rest_framework.permissions import BasePermission

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView


class StaffWithPermission(BasePermission):
    """Active staff with the permission for the view's action, the same as in Django's admin.

    A view says by `permissions_of(action)` which ones serve, any of them. An action without one is nobody's.
    """

    def has_permission(self, request: Request, view: Any) -> bool:
        user = request.user
        serving = view.permissions_of(getattr(view, "action", None))
        return user.is_active and user.is_staff and any(user.has_perm(f"django_delayq.{name}") for name in serving)


class Nobody(BasePermission):
    """Refuses everybody, superusers too: the project has not said yet who may look."""

    message = _("This address needs permission_classes of the project's own.")

    def has_permission(self, request: Request, view: APIView) -> bool:
        return False

    def has_object_permission(self, request: Request, view: APIView, obj: Any) -> bool:
        return False
