"""What of the frameworks for distributed training a process uses."""
