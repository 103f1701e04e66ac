"""The Python API (docs/python.md), for training scripts and notebooks: standard library only."""
