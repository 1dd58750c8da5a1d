"""`quantexp draw`: analyses captured tensors in figures, tables and text.

The engine is here (`verb`, `source`), and what draws one tensor; what draws many tensors together is a `Chapter`.
"""
