"""Quantised copies of weights, cached within an optimizer step."""
