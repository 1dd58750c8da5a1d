"""Attention in tiles on a GPU, in Triton: what `quantexp.quant.attention.tiled` does in torch, T x T in on-chip memory alone.

`gpu` says what is claimed and calls the kernels, `triton_*` are the kernels, and `agreement` holds their results
against those of the torch tiles.
"""
