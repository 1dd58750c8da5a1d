"""What a run's identity says it computes on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quantexp.device import device_class
from quantexp.schema import LauncherConfig, LauncherKind


@pytest.mark.parametrize(
    ("gpus", "kind", "device"), [(0, None, "cpu"), (2, None, "cuda"), (2, "h100", "cuda (h100)")]
)
def test_job_is_known_by_what_it_asks_for(gpus: int, kind: str | None, device: str) -> None:
    launcher = LauncherConfig(kind=LauncherKind.slurm, gpus_per_node=gpus, gpu_type=kind)
    assert device_class(launcher) == device


def test_without_a_driver_the_device_is_known_without_torch() -> None:
    script = (
        "import ctypes, sys\n"
        "def absent(name): raise OSError(name)\n"
        "ctypes.CDLL = absent\n"
        "from quantexp.device import device_class\n"
        "from quantexp.schema import LauncherConfig\n"
        "print(device_class(LauncherConfig()), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "cpu False\n", done.stderr


@pytest.mark.parametrize(("available", "name"), [(True, "NVIDIA H200"), (False, "cpu")])
def test_with_a_driver_torch_says_what_the_device_is(
    monkeypatch: pytest.MonkeyPatch, available: bool, name: str
) -> None:
    monkeypatch.setattr("quantexp.device.ctypes.CDLL", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert device_class(LauncherConfig()) == name
