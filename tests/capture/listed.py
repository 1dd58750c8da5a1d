"""Captured values, and lines of statistics."""

from __future__ import annotations

import json
from typing import Any

import torch


def value(i: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) + i


def statistics_line(**more: Any) -> str:
    place = {"layer": 0, "module": "fc1", "tensor": "input", "operation": "forward", "iteration": 1}
    return json.dumps({**place, "statistics": {"std": 1.0}, **more}) + "\n"
