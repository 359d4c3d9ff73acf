"""The small Django project of every contestant: the same tables and the same two handlers."""
