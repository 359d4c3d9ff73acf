"""An app whose policy connects to another service."""
