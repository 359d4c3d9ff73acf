"""Report the state of an installation: snapshot, Redis, doctor."""
