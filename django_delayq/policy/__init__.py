"""What a policy is: its options, their checks, and what it reads."""
