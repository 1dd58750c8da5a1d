"""Everything that knows Megatron-Core: model, layer specs with the scheme injected, and the training loop."""
