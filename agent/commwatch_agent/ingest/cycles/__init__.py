"""The cycle that the operations of a rank repeat, and its turns: iterations."""
