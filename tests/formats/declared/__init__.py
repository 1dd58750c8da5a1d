"""Declared formats."""
