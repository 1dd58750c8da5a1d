"""Analyses many captured tensors together: measures of each under its formats, and figures over all of them.

place      where a tensor belongs
rounded    what is rounded in place of an operand
operand    one operand under one format: errors, scale exponents, codes
outliers   channels and heads that stand out
measured   all measures of one tensor, from its values or its statistics alone
table      the same of a collection, as CSV and JSON
"""
