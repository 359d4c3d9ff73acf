"""Time: this process's clock, working hours, spans and delays. Nothing here asks for the time of a database."""
