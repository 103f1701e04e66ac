"""The native hook: its C++ source, its build, and its loading in the trainer."""
