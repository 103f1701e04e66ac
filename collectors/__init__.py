"""Collectors: one file per source. Code that runs inside the trainer needs only the standard library and torch."""
