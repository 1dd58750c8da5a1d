"""Captured tensors as records: their place in the model, their operands, their statistics."""
