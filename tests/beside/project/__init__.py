"""A project that uses a dozen other apps, each on a model with a policy. Its tests are in `tests/beside/apps`."""
