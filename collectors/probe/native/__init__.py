"""The native hook: its C++ source, how it is built, and how a trainer finds and loads what was built."""
