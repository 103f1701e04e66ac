"""The list of kinds and alerts, and the receivers of notifications."""
