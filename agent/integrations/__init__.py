"""commwatch in the loggers of training frameworks: one module for each, which imports the framework (docs/python.md)."""
