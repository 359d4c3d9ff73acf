"""A round is a value: its columns by groups, what each event does to them, and what it remembers. No database."""
