"""Arguments in, one call out."""
