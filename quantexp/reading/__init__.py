"""Reads files that anyone may have written: bounded JSON and YAML from regular files, checked against a type."""
