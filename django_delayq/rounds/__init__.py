"""What happens to a round, as values: pure functions of a row and of facts that were read before. No database."""
