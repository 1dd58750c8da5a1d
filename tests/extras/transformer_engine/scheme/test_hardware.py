"""The table of GPUs and versions, against NVIDIA's list of compute capabilities and Transformer Engine's checks."""

from __future__ import annotations

import pytest

from quantexp.extras.transformer_engine.scheme.hardware import (
    CAPABILITIES,
    Gpu,
    gpu_named,
    obstacle,
    too_old,
    version_numbers,
)
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe

#: Of each kind one with all that a GPU may refuse.
ALL = [Recipe(kind, power_of_two=kind is Kind.BLOCK) for kind in Kind]
#: developer.nvidia.com/cuda-gpus, and what Transformer Engine 2.11.0 says of each.
ABLE = {
    "v100": set(),
    "a100": set(),
    "l4": {Kind.CURRENT, Kind.DELAYED, Kind.CUSTOM},
    "h100": {Kind.CURRENT, Kind.DELAYED, Kind.BLOCK, Kind.CUSTOM},
    "h200": {Kind.CURRENT, Kind.DELAYED, Kind.BLOCK, Kind.CUSTOM},
    "b200": set(Kind),
    "gb300": set(Kind),
    "rtx5090": set(Kind) - {Kind.MXFP8},
}


@pytest.mark.parametrize("name", ABLE)
def test_a_gpu_runs_what_transformer_engine_lets_it_run(name: str) -> None:
    gpu = gpu_named(name)
    assert gpu is not None
    assert {each.kind for each in ALL if obstacle(each, gpu) is None} == ABLE[name]


def test_an_obstacle_is_one_line_with_what_is_needed() -> None:
    h100 = Gpu("NVIDIA H100", (9, 0), (12, 8))
    assert obstacle(Recipe(Kind.MXFP8), h100) == (
        "MXFP8BlockScaling(E4M3) needs compute capability 10.0 or higher, and NVIDIA H100 has 9.0"
    )
    assert obstacle(Recipe(Kind.BLOCK, power_of_two=True), h100) == (
        "Float8BlockScaling(E4M3, w 128, powers of two) needs CUDA 12.9 or newer, and torch is built for 12.8"
    )
    assert obstacle(Recipe(Kind.BLOCK), Gpu("B200", (10, 0))) == (
        "Float8BlockScaling(E4M3, w 128, float32 scales) needs scales that are powers of two from compute capability "
        "10.0 on, and B200 has 10.0"
    )
    assert obstacle(Recipe(Kind.MXFP8), Gpu("RTX 5090", (12, 0))) == (
        "MXFP8BlockScaling(E4M3) needs a compute capability below 12.0, and RTX 5090 has 12.0"
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("NVIDIA GB200", "gb200"),
        ("GeForce RTX 4090", "rtx4090"),
        ("l40s", "l40s"),
        ("mi300x", None),
    ],
)
def test_a_gpu_is_found_in_a_longer_name(name: str, known: str | None) -> None:
    gpu = gpu_named(name)
    assert (gpu and gpu.capability) == (known and CAPABILITIES[known])


def test_an_old_version_is_refused_with_the_newer_one() -> None:
    assert too_old("2.11.0+c188b53") is None
    assert too_old("2.9") is None
    assert too_old("2.8.0") == (
        "needs Transformer Engine 2.9 or newer, got 2.8.0; pip install 'quantexp[te]'"
    )


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.11.0+c188b53", (2, 11, 0)), ("2.12.0.dev1", (2, 12, 0)), ("13.0", (13, 0))],
)
def test_a_version_is_read_up_to_its_suffix(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers
