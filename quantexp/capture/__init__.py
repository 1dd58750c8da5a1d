"""Capture: which tensors are kept, what they cost, how they are named and stored."""
