"""Writes and reads the capture folder: values, manifest, statistics."""
