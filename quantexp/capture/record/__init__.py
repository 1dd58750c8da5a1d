"""From hooks in the model to tensors on the host."""
