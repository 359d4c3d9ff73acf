"""What the tests of declaring and scheduling share."""
