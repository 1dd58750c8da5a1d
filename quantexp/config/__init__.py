"""Composes, loads and validates an experiment from command-line overrides."""
