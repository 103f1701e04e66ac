"""The list of alerts, its evaluator, and the receivers of notifications."""
