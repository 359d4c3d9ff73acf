"""The outbox in the admin, to be read. Its timeouts are operated like all others: search them by the message id."""

from django.contrib import admin
from django.http import HttpRequest

from django_delayq.contrib.webhooks.models import Delivery


@admin.register(Delivery)
class DeliveryAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # at runtime it takes none
    """Messages, and whether they were delivered."""

    list_display = ("message_id", "endpoint", "event", "policy", "created_at", "delivered_at")
    list_filter = ("event", ("delivered_at", admin.EmptyFieldListFilter))
    search_fields = ("=message_id",)
    ordering = ("-pk",)
    show_full_result_count = False

    def has_view_permission(self, request: HttpRequest, obj: Delivery | None = None) -> bool:
        """Require `view_timeout`, too: a message has what the page of its timeout shows, such as the payload."""
        return super().has_view_permission(request, obj) and request.user.has_perm("django_delayq.view_timeout")

    def has_add_permission(self, request: HttpRequest, obj: Delivery | None = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission
