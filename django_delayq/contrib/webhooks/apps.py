"""The app: check the settings, and connect the outbox."""

from django.apps import AppConfig
from django.core.checks import register
from django.utils.translation import gettext_lazy as _

from django_delayq.signals import policy_pausing, timeouts_pruned, timeouts_settling


class WebhooksConfig(AppConfig):
    """Connects the signals, once per process."""

    name = "django_delayq.contrib.webhooks"
    label = "delayq_webhooks"
    verbose_name = _("Webhooks of timeouts")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_delayq.contrib.webhooks import endpoints, outbox

        endpoints.get_endpoints.__wrapped__()  # a wrong setting shows now, and not when the first timeout fires
        timeouts_settling.connect(outbox.write_settled, dispatch_uid=self.label)
        policy_pausing.connect(outbox.write_braked, dispatch_uid=self.label)
        timeouts_pruned.connect(outbox.forget_old, dispatch_uid=self.label)
        register(endpoints.check_endpoints, "django_delayq")
