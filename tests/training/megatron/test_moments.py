"""Adam's moments are what the formats leave of them, from one step to the next.

The oracle rounds with torch's own float8 types, under scales that follow from the published definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quantexp.model.checkpoints import STATE, folder_of
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.status import State, read_status
from quantexp.training.megatron.finite import step_if_finite
from quantexp.training.megatron.rounded_pieces import RoundedPiece
from quantexp.training.megatron.state_shards import Held
from tests.training.megatron.state_plants import left_out

RunTiny = Callable[..., RunDir]
BETAS = (0.9, 0.95)
RUN = [
    *("quant=bf16", "capture=off", "training.iterations=2"),
    *("training.precision=fp32", "training.clip_grad=0", "training.warmup_iterations=0"),
]
KEEP = ["checkpoint.every=1", "checkpoint.optimizer=true"]
FP8 = [f"quant.optimizer.{moment}.format=fp8_1x128" for moment in ("exp_avg", "exp_avg_sq")]


def moments(run: RunDir, iteration: int) -> dict[str, Tensor]:
    """`exp_avg/NAME` and `exp_avg_sq/NAME` of a checkpoint, and `main/NAME`."""
    return load_file(folder_of(run, iteration) / STATE / "rank00000.safetensors")


def fp8_in_blocks(x: Tensor) -> Tensor:
    """E4M3 under float32 scales amax / 448 of blocks of 128 along the rows (arXiv 2412.19437, section 3.3.2)."""
    matrix = x if x.ndim == 2 else x[None]
    parts = []
    for part in matrix.split(128, dim=1):
        scale = part.abs().amax(dim=1, keepdim=True) / 448
        scale[scale == 0] = 1
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, dim=1).view(x.shape)


def close_to_a_grid_point(actual: Tensor, expected: Tensor) -> bool:
    """Equal but for ties and last bits: a quotient that is rounded on the other side is one step of E4M3 away."""
    differ = (actual - expected).abs() > 1e-6 * expected.abs()
    is_near = torch.allclose(actual, expected, rtol=0.13, atol=1e-12)
    return bool(differ.float().mean() < 1e-3) and is_near


def test_a_step_reads_the_rounded_moments_and_updates_with_the_new_ones(run_tiny: RunTiny) -> None:
    plain, rounded = run_tiny(*RUN, *KEEP), run_tiny(*RUN, *KEEP, *FP8)
    first, second = moments(plain, 1), moments(plain, 2)
    own_first, own_second = moments(rounded, 1), moments(rounded, 2)
    kinds = dict(zip(("exp_avg", "exp_avg_sq"), BETAS, strict=True))
    names = [name.removeprefix("main/") for name in first if name.startswith("main/")]
    assert len(names) > 10
    for name in names:
        # The first step's update is that of unrounded moments, so the second step has the same gradient.
        assert torch.equal(first[f"main/{name}"], own_first[f"main/{name}"])
        for kind, beta in kinds.items():
            key = f"{kind}/{name}"
            assert close_to_a_grid_point(own_first[key], fp8_in_blocks(first[key])), key
            gained = second[key] - beta * first[key]
            expected = fp8_in_blocks(beta * own_first[key] + gained)
            assert close_to_a_grid_point(own_second[key], expected), key
    changed = sum(not torch.equal(second[f"main/{n}"], own_second[f"main/{n}"]) for n in names)
    assert changed == len(names)


def test_proof_and_map_name_the_moments(run_tiny: RunTiny) -> None:
    run = run_tiny(*RUN, *FP8[:1], "quant.optimizer.exp_avg_sq.format=mxfp8")
    entries = [e for e in read_precision(run.precision)["entries"] if e["site"] == "optimizer"]
    assert [(e["product"], e["operand"], e["format"], e["status"]) for e in entries] == [
        ("adam", "exp_avg", "fp8_1x128", "engaged"),
        ("adam", "exp_avg_sq", "mxfp8_e4m3", "engaged"),
    ]
    assert all(e["calls"] >= e["quantised_calls"] > 10 for e in entries)


def test_moments_with_rows_of_zeros_are_proved(run_tiny: RunTiny) -> None:
    """An embedding that is not tied has a gradient for the tokens of the micro-batches alone."""
    run = run_tiny("quant=more/adam_fp8_fp16", *RUN[1:], "model.tie_embeddings=false")
    assert read_precision(run.precision)["proved"]


@pytest.mark.parametrize(
    "plant",
    [
        (RoundedPiece, "round", lambda *args: None),
        (Held, "moment", lambda held, kind: held.adam.state[held.main][kind].clone()),
    ],
    ids=["not rounded", "a copy is rounded"],
)
def test_moments_that_are_not_on_the_grid_fail_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, plant: tuple[type, str, object]
) -> None:
    monkeypatch.setattr(*plant)
    run = run_tiny(*RUN, *FP8, expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "optimizer.adam.exp_avg of " in str(status.reason)
    assert "declared fp8_1x128" in str(status.reason)


def test_a_step_that_is_left_out_is_proved_by_a_later_one(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def left_out_once(*args: Any) -> tuple[bool, float]:
        calls.append(args)
        return left_out(*args) if len(calls) == 1 else step_if_finite(*args)

    monkeypatch.setattr("quantexp.training.megatron.watched_step.step_if_finite", left_out_once)
    run = run_tiny(*RUN, *FP8)
    precision = read_precision(run.precision)
    assert precision["proved"]
    assert precision["iteration"] == 2
    (earlier,) = precision["earlier"]  # type: ignore[typeddict-item]
    assert not earlier["proved"]
