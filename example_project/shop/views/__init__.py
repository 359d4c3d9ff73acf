"""The views: `pages` show something, `actions` change something."""
