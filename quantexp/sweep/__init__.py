"""Sweeps: `points` turns the words of a multirun into validated points, `run` runs them."""
