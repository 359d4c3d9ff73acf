"""An app whose policy sends a mail through a real SMTP connection."""
