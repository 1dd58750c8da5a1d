"""The matrix products of attention with the declared quantisation: plain, fused and tiled."""
