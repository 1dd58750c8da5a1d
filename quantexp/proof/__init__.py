"""The proof of engagement: what reached the matrix products, held against what was declared."""
