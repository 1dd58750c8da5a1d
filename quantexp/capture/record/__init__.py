"""Records tensors: from hooks in the model to tensors in host memory."""
