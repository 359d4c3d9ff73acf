"""Start: discover and check the policies, and connect the receivers of saves and deletes."""

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _

from django_delayq.logs import protect


class DelayqConfig(AppConfig):
    """The Django app."""

    name = "django_delayq"
    verbose_name = _("Timeouts")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_delayq import checks
        from django_delayq.arming import receivers
        from django_delayq.conf import get_settings
        from django_delayq.ledger import advances
        from django_delayq.policy.declaring import check_against_model
        from django_delayq.policy.policies import registry

        protect()
        # A web server runs no system checks, and each save would fail. Not cached: a test may still change settings.
        get_settings.__wrapped__()
        autodiscover_modules("timeouts")
        for policy in registry:  # also those that were declared before the models were loaded
            check_against_model(policy)
        receivers.connect()
        registry.connect, registry.advanced = receivers.connect, advances.since
        checks.register()
