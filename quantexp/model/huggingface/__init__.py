"""Published models: their configurations, tensor names, and weights, read and written. Here: the names of the files."""

from __future__ import annotations

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
