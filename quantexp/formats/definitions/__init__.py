"""Number formats that a configuration declares: what a file may say, and the format that it means. Needs no torch.

One that is a known kind of arithmetic gets that family, its kernels and its proof; all others are of the family `grid`,
whose arithmetic is in `quantexp.formats.declared`.
"""
