"""`quantexp draw`: analyses captured tensors in figures, tables and text.

The engine is here (`verb`, `source`, `pool`), and what looks at one tensor; what looks at many tensors together is a
`Chapter`, listed in `chapters`. `divided` is the command as work that jobs of a cluster share, `part` what one of them
does, `kept` what they leave for the last.
"""
