"""Predicted memory of a run, and whether it fits."""
