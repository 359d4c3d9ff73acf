"""Models of a helpdesk, whose deadlines are counted in office hours: the calendar and the zone are data of a team."""

from __future__ import annotations

from django.db import models

from django_delayq import TimeoutRelation, WorkingHours


class Team(models.Model):
    name = models.CharField(max_length=50, default="")
    zone = models.CharField(max_length=50, default="UTC", blank=True)
    hours = models.CharField(max_length=50, default="09:00-17:00", blank=True)
    opens_on = models.DateField(null=True)
    opens_at = models.DateTimeField(null=True)

    @property
    def calendar(self) -> WorkingHours | None:
        """Monday to Friday; None: the team has no hours."""
        return WorkingHours(self.zone, {"mon-fri": self.hours}) if self.hours else None


class Ticket(models.Model):
    """Open, then closed, and in between perhaps waiting for the customer."""

    team = models.ForeignKey(Team, null=True, on_delete=models.CASCADE)
    status = models.CharField(max_length=20, default="open")
    opened_at = models.DateTimeField(null=True)
    promised_on = models.DateField(null=True)
    timeouts = TimeoutRelation()
