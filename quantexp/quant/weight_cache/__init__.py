"""Quantised copies of weights, kept within an optimizer step."""
