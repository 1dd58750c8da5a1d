"""Checks of a configuration that its types do not make."""
