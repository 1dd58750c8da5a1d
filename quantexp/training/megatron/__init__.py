"""All code that depends on Megatron-Core: the model, layer specs with the scheme injected, and the training loop."""

import quantexp.training.megatron.imported  # noqa: F401  before any other module imports Megatron
