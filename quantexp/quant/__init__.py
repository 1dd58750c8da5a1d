"""Schemes: which operand of which matrix product is held in which format, and the products themselves."""
