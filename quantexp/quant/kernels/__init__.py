"""Tiled attention on a GPU, in Triton: `quantexp.quant.attention.tiled` with T x T in on-chip memory alone.

`gpu` says what is claimed and calls the kernels, `triton_*` are the kernels, and `agreement` holds their results
against those of the torch tiles.
"""
