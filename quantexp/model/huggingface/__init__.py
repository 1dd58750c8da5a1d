"""Published models: their configurations, tensor names, and weights, read and written."""
