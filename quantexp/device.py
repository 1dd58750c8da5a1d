"""What a run computes on, as far as its identity is concerned."""

from __future__ import annotations

import ctypes
from pathlib import Path

from quantexp.schema import LauncherConfig, LauncherKind


def device_class(launcher: LauncherConfig) -> str:
    """`cpu`, or the GPU's name; of a job that is still to start, `cuda` with the kind of GPU that was asked for."""
    if launcher.kind is LauncherKind.slurm:
        if not launcher.gpus_per_node:
            return "cpu"
        return f"cuda ({launcher.gpu_type})" if launcher.gpu_type else "cuda"
    if not has_driver():
        return "cpu"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def has_driver() -> bool:
    """Whether there may be a GPU at all; if not, torch, which takes a second to import, need not be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True
