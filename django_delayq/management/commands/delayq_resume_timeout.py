"""`manage.py delayq_resume_timeout`: let the clocks of timeouts run again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Lets the clocks of timeouts run that were stopped by hand, with the rest of their time, and resumes paused ones.

    --dry-run counts those that would be due at once.
    """

    examples = ("--policy shop.order.cancel_unpaid --object 1234 --reason 'they agreed'", "--id 17")
    name, done = "resume_timeout", "resumed"
