"""What if: recorded steps, replayed under changes."""
