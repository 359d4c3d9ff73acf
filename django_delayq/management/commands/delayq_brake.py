"""`manage.py delayq_brake`: set after how many firings a policy pauses itself."""

from django_delayq.management.operating import GuardCommand


class Command(GuardCommand):
    """Sets the brake: the policy pauses itself when more than NUMBER of its timeouts fire within a period."""

    arguments = "LABEL NUMBER|off|declared"
    examples = (
        "shop.order.cancel_unpaid 500 --per 10m",
        "shop.order.cancel_unpaid off --reason 'a campaign ends tonight'",
    )
    name = "brake"
