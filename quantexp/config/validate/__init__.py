"""Checks of a configuration beyond its types."""
