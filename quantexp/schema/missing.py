"""OmegaConf's marker of a required value, defined here because importing OmegaConf is slower than the whole schema."""

from __future__ import annotations

from typing import Any

MISSING: Any = "???"
