"""Transformer Engine's linear layers in Megatron's model, each under its own recipe; imports both packages."""
