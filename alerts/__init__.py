"""The one list of alerts, its evaluator and its notifiers."""
