"""What loads in the trainer: the hooks and all that they need. Standard library and torch only."""
