"""Parts that a project chooses: the core imports none of them, only template tags do."""
