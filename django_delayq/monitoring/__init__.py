"""Show how an installation is doing: snapshot, Redis, doctor."""
