"""The capture folder: values, manifest, statistics."""
