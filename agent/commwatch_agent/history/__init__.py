"""The history of a host in SQLite: written, read, checked for damage."""
