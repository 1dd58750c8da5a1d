"""The proof of engagement: compares the operands that reach the matrix products with their declarations."""
