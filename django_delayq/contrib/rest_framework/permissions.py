"""Who may look, and who may act. Staff with the permission for it, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rest_framework.permissions import BasePermission

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView

VIEW = "django_delayq.view_timeout"


class StaffWithPermission(BasePermission):
    """Active staff with the permission that the view's action names, the same as in Django's admin.

    A view says which by `needed_permission`; a view that says nothing may not be used.
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        user = request.user
        needed = getattr(view, "needed_permission", None)
        return bool(needed and user.is_active and user.is_staff and user.has_perm(needed))


class Nobody(BasePermission):
    """Refuses everybody, superusers too: the project has not said yet who may look."""

    message = "This address needs permission_classes of the project's own."

    def has_permission(self, request: Request, view: APIView) -> bool:
        return False

    def has_object_permission(self, request: Request, view: APIView, obj: Any) -> bool:
        return False
