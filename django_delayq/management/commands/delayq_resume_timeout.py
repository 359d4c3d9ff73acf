"""`manage.py delayq_resume_timeout`: let the clocks of timeouts run again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="resume_timeout", done="resumed"):
    """Lets the clocks of timeouts run that were stopped by hand, with the rest of their time, and resumes paused ones.

    --dry-run counts those that would be due at once.

    Examples:
      manage.py delayq_resume_timeout --policy shop.order.cancel_unpaid --object 1234 --reason 'they agreed'
      manage.py delayq_resume_timeout --id 17
    """
