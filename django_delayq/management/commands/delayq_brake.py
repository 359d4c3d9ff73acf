"""`manage.py delayq_brake`: set after how many firings a policy pauses itself."""

from django_delayq.management.operating import GuardCommand


class Command(GuardCommand, name="brake", arguments="LABEL NUMBER|off|declared"):
    """Sets the brake: the policy pauses itself when more than NUMBER of its timeouts fire within a period.

    Examples:
      manage.py delayq_brake shop.order.cancel_unpaid 500 --per 10m
      manage.py delayq_brake shop.order.cancel_unpaid off --reason 'a campaign ends tonight'
    """
