"""Where alerts go: one file per kind of receiver, and how each is asked for in the settings."""
