"""What of a scheme Transformer Engine's recipes hold, how near, and on which hardware; without importing it."""
