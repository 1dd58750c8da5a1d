"""Computes a tensor's statistics, in torch and in compiled code."""
