"""Operands as Transformer Engine stores them, held against the declared slots; without importing Transformer Engine."""
