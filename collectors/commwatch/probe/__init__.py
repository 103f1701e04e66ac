"""Code that runs in the trainer: the hooks and what they need. Standard library and torch only."""
