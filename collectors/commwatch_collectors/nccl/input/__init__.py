"""The forms in which a log arrives: prefixes, records of other programs, wrapped lines."""
