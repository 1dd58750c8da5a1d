"""Schemes (the format of every operand of every matrix product) and the quantised products themselves."""
