"""Executes runs on this machine: prepared together, then started in slots, in the foreground or the background."""
