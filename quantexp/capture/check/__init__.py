"""Checks a capture folder: every file, every line, every count."""
