"""Signed webhooks about timeouts: add `"django_delayq.contrib.webhooks"` to INSTALLED_APPS, and set `DELAYQ_WEBHOOKS`.

A message is a row of the outbox, written in the transaction of the outcome that it reports. A timeout policy sends it,
with the retries of the library.
"""
