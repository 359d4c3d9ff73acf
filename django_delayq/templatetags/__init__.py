"""Template tags: `{% load delayq %}`."""
