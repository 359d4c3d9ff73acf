"""The project's one app. It is the same with and without django_delayq."""
