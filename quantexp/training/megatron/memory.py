"""Memory in use, in units of 1e9 bytes."""

from __future__ import annotations

import psutil
import torch


def memory_gb(device: torch.device) -> float:
    """On a GPU the largest allocation since the start; on a CPU what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return float(psutil.Process().memory_info().rss) / 1e9
