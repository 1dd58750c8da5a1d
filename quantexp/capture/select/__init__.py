"""Selects the tensors and iterations of a capture, and computes their cost."""
