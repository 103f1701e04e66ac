"""Ring files: which are opened, and in which order they are read."""
