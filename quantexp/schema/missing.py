"""The mark of a value that must be given, as OmegaConf writes it, whose import takes longer than the whole schema."""

from __future__ import annotations

from typing import Any

MISSING: Any = "???"
