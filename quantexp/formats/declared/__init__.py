"""Number formats that a configuration declares: their definitions, and the arithmetic of those that are new.

`definition` reads a declaration (no torch needed). One that is a known kind of arithmetic gets that family, its kernels
and its proof; all others are of the family `grid`, whose torch code is `arithmetic`.
"""
