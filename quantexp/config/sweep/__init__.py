"""Sweeps: turns the overrides of a multirun into validated points."""
