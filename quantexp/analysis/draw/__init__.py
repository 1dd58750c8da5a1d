"""`quantexp draw`: analyses captured tensors in figures, tables and text.

The engine is here (`verb`, `source`, `pool`), and what looks at one tensor; what looks at many tensors together is a
`Chapter`, listed in `chapters`.
"""
