"""Attention in tiles on a GPU, in Triton: `quantexp.quant.attention.tiled` with T x T in on-chip memory only.

`gpu` states what is supported and calls the kernels, `triton_*` are the kernels, and `agreement` compares their results
with those of the torch tiles.
"""
