"""Everything that watches: one file per source. What runs inside the trainer needs only the standard library and torch."""
