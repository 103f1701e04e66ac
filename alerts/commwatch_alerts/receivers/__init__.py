"""Receivers of alerts: one file per kind, and their settings."""
