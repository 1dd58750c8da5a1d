"""Which tensors a capture keeps, when, and what they cost."""
