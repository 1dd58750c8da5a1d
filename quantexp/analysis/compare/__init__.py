"""Runs side by side: losses against bf16, speed, and what else differs between them than the scheme.

Reads run folders alone; needs neither torch nor Megatron.
"""
