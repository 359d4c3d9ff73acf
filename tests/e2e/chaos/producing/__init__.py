"""The operations of applications during faults, each with its line in the journal."""
