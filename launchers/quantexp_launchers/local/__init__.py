"""Several runs of this machine: prepared together, then started in slots, in the foreground or in the background."""
