"""`manage.py delayq_resume_timeout`: end holds and pauses of timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="resume_timeout", done="resumed"):
    """Resumes timeouts that are on hold or paused by hand. After a hold they have the rest of their time.

    --dry-run counts those that would be due at once.

    Examples:
      manage.py delayq_resume_timeout --policy shop.order.cancel_unpaid --object 1234 --reason 'they agreed'
      manage.py delayq_resume_timeout --id 17
    """
