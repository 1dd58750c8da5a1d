"""Published models: their configurations, their tensors' names, their weights in and out."""
