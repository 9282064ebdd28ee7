"""Checkpoint files: what they hold, and whether what they say is true."""
