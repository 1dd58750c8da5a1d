"""Figures and tables over many captured tensors, from their measures (`quantexp.analysis.measures`)."""
