"""All code that depends on Megatron-Core: the model, layer specs with the scheme injected, and the training loop."""
