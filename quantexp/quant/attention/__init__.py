"""Quantised matrix products of attention: the plain, the fused and the tiled path."""
