"""The implementation of each command."""
