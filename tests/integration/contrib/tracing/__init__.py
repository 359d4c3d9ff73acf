"""Traces of OpenTelemetry, and scopes of Sentry."""
