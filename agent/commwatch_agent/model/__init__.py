"""Values, formulas and words that all other packages use: no clock, no file, no thread."""
