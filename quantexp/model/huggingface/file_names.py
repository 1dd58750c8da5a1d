"""The names of the files of published weights. Imports nothing."""

from __future__ import annotations

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
