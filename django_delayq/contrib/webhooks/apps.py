"""The app: check its setting at the start."""

from django.apps import AppConfig
from django.core.checks import register
from django.utils.translation import gettext_lazy as _

from django_delayq.contrib.webhooks import endpoints


class WebhooksConfig(AppConfig):
    """Checks the setting. `timeouts`, which is loaded after all models, connects the outbox."""

    name = "django_delayq.contrib.webhooks"
    label = "delayq_webhooks"
    verbose_name = _("Webhooks of timeouts")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        endpoints.get_endpoints.__wrapped__()  # a wrong setting shows now, and not when the first timeout fires
        register(endpoints.check_endpoints, "django_delayq")
