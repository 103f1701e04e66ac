"""Values, formulas and words that every other room uses: no clock, no file, no thread."""
