"""Verbs of ``commwatch manifest``, and what they share."""
