"""What is wrong or slow by what a log holds: the rules, their checks, and the order of findings. Pure."""
