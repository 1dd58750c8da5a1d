"""What the Triton attention kernels support."""

from __future__ import annotations

import pytest
import torch

from quantexp.formats.kernels import gpu as quantising
from quantexp.formats.kernels import torch_alone
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels.gpu import claims, obstacles, padded
from quantexp.quant.attention.kernels.launches import launch_for
from quantexp.quant.attention.tiled import kernels_for

from .tiled_cases import FULL_HIFP8, FULL_MXFP8, SCHEMES, declared

BF16 = ("quant=bf16",)
#: Declarations left to the torch tiles, and the slots responsible.
LEFT = {
    "nvfp4, P again": ["pv.fprop.P", "pv.dgrad_v.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS"],
    "fp8, P again": ["pv.fprop.P", "pv.dgrad_v.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS"],
    "floor, clipped": ["pv.fprop.P"],
    "3/4 of mxfp4": ["pv.dgrad_v.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS"],
    "Hadamard": ["pv.fprop.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS"],
    "blocks of 64": ["pv.fprop.P", "pv.dgrad_v.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS"],
    "delayed": ["pv.fprop.P", "pv.dgrad_v.P"],
    "stochastic": ["pv.fprop.P", "pv.dgrad_v.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS"],
    "stochastic, used again": ["pv.fprop.P", "pv.dgrad_v.P"],
    "divided later": ["pv.fprop.P"],
    "delta of o": ["pv.fprop.P"],
}
MORE = {
    "delayed": (*BF16, "quant/pv=hifp8", "quant.pv.scaling=delayed"),
    "divided later": (*BF16, "quant.pv.unnormalised=true"),
    "delta of o": (*BF16, "quant.pv.delta=o"),
}


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every tensor is on a GPU with kernels."""
    monkeypatch.setattr(quantising, "reads", lambda x: True)


@pytest.mark.parametrize("name", LEFT)
def test_unsupported_slots_are_left_to_torch(name: str) -> None:
    words = MORE.get(name) or SCHEMES[name]
    labels = [str(e.slot) for e in obstacles(declared(*words))]
    assert sorted(labels) == sorted(LEFT[name])


@pytest.mark.parametrize(
    "words",
    [
        BF16,
        FULL_MXFP8,
        FULL_HIFP8,
        SCHEMES["mxfp4, P again"],
        SCHEMES["mxfp6, P again"],
        SCHEMES["exact hifp8 of dS and P alone"],
        (*BF16, "quant.qk.fprop.q={format: mxfp4, rounding: stochastic}"),
        (*BF16, "quant/qk=hifp8", "quant.qk.fprop.q.scaling=delayed"),
    ],
)
@pytest.mark.usefixtures("_device")
def test_mx_hifp8_and_any_format_of_q_and_k_are_claimed(words: tuple[str, ...]) -> None:
    q = torch.zeros(3, 1, 2, 192, dtype=torch.bfloat16)
    assert claims(declared(*words), q, q[..., :128])
    assert kernels_for(AttentionCall(declared(*words), 1.0), q, q) is not None


@pytest.mark.usefixtures("_device")
def test_float32_wide_heads_and_torch_alone_are_not_claimed() -> None:
    precision = declared(*BF16)
    q = torch.zeros(3, 1, 2, 256, dtype=torch.float16)
    assert claims(precision, q, q)
    assert not claims(precision, q.float(), q.float())
    wide = torch.zeros(3, 1, 2, 257, dtype=torch.float16)
    assert not claims(precision, wide, q)
    assert not claims(precision, q, wide)
    with torch_alone():
        assert kernels_for(AttentionCall(precision, 1.0), q, q) is None


def test_tensors_of_a_cpu_are_not_claimed() -> None:
    q = torch.zeros(3, 1, 2, 32, dtype=torch.bfloat16)
    assert kernels_for(AttentionCall(declared(*BF16), 1.0), q, q) is None


def test_every_width_that_is_claimed_has_a_launch() -> None:
    for width in range(1, 257):
        launch = launch_for(padded(width))
        assert launch.rows % 32 == launch.keys % 32 == 0
        assert padded(width) >= max(width, 16)
