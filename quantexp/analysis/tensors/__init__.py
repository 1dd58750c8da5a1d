"""Captured tensors as records: their position in the model, their operands, their statistics."""
