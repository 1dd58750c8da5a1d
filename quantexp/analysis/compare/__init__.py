"""Compares runs: losses against bf16, speed, and differences other than the scheme.

Reads run folders alone; needs neither torch nor Megatron.
"""
