"""The proof of tiled attention by kernels that no dispatcher observes: the torch tiles run in addition."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from quantexp.capture import open_capture
from quantexp.quant.attention import tile_passes, tile_products, tiled
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.kernels.gpu import Amaxes, Quantised
from quantexp.quant.sites import Slot
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from tests.recorded import failure

RunTiny = Callable[..., RunDir]
WORDS = (
    "quant=more/FA_full_mxfp8",
    "quant/pv=mxfp8",
    "quant.pv.dgrad_p.dO.format=mxfp8",
    "quant.pv.dgrad_v.P.format=mxfp8",
    "quant.pv.dgrad_v.dO.format=mxfp8",
    "training.attention=tiled",
    "model.num_layers=1",
    "training.iterations=3",
    "training.warmup_iterations=0",
    "capture=off",
)


def softmax(S_BHRK: Tensor, start: int) -> Tensor:
    R, K = S_BHRK.shape[2:]
    hidden = torch.arange(K) > torch.arange(start, start + R)[:, None]
    return torch.softmax(S_BHRK.float().masked_fill(hidden, -10000.0), dim=-1).to(S_BHRK.dtype)


class Borrowing(tile_products.TileProducts):
    """Takes its operands of T x D from another object's pass."""

    lender: Quantised

    def quantised(self, slot: Slot) -> Tensor:
        return self.lender(slot)


class Unseen:
    """Replaces the kernels: runs the torch tiles outside every mode, with o and dq scaled by a factor each."""

    factors = (1.0, 1.0)

    def __init__(self, work: Borrowing) -> None:
        self.work = work
        self.amaxes: Amaxes = {}
        self.calls: list[str] = []

    def forward(self, quantised: Quantised, amaxes: Amaxes | None = None) -> Tensor:
        self.calls.append("forward")
        self.work.lender = quantised
        with _disable_current_modes():
            o = tile_passes.Forward(self.work).output()
            return o * self.factors[0]

    def backward(
        self, quantised: Quantised, amaxes: Amaxes | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append("backward")
        self.work.lender = quantised
        with _disable_current_modes():
            dq, dk, dv = tile_passes.Backward(self.work).gradients()
            return dq * self.factors[1], dk, dv


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[Unseen]:
    """One per micro-batch, in a run of two tiles."""
    kernels: list[Unseen] = []

    def kernels_for(call: AttentionCall, q: Tensor, v: Tensor) -> Unseen:
        assert call.mask is None
        unhooked = AttentionCall(call.precision, call.softmax_scale)
        kernels.append(Unseen(Borrowing(unhooked, q, softmax)))
        return kernels[-1]

    monkeypatch.setattr("quantexp.quant.attention.tiles.ROWS", 32)
    monkeypatch.setattr(tiled, "kernels_for", kernels_for)
    return kernels


def entries(run: RunDir) -> list[dict[str, Any]]:
    content = json.loads(run.precision.read_text())
    return [e for e in content["entries"] if e["site"] != "linear"]


def test_the_tiles_beside_the_kernels_are_proved_and_run_only_in_that_iteration(
    run_tiny: RunTiny, stand_ins: list[Unseen], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    tiles = tile_products.TileProducts.tiles

    def counted(self: Any, *, whole_rows: bool) -> Any:
        is_beside = all(self is not each.work for each in stand_ins)
        passes.extend(["beside"] if is_beside else [])
        return tiles(self, whole_rows=whole_rows)

    monkeypatch.setattr(tile_products.TileProducts, "tiles", counted)
    run = run_tiny(*WORDS)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.COMPLETED, status.reason
    for entry in entries(run):
        assert entry["status"] == "engaged", (entry, entry["reason"])
        assert entry["quantised_calls"] == entry["calls"] > 0
    assert len(entries(run)) == 12
    a_run = [call for kernels in stand_ins for call in kernels.calls]
    assert a_run.count("forward") == a_run.count("backward") == 3 * entries(run)[0]["calls"]
    assert len(passes) == len(a_run) / 3


@pytest.mark.parametrize(
    ("factors", "name"), [((1.05, 1.0), "o"), ((1.0, 1.05), "dq")], ids=["o", "dq"]
)
def test_kernel_that_multiplies_something_else_fails_the_run(
    run_tiny: RunTiny,
    stand_ins: list[Unseen],
    monkeypatch: pytest.MonkeyPatch,
    factors: tuple[float, float],
    name: str,
) -> None:
    monkeypatch.setattr(Unseen, "factors", factors)
    reason = failure(run_tiny(*WORDS, expect=1))
    assert (
        f"layer 0 attention: {name} of Triton's kernel is not that of the tiles of torch" in reason
    )
    assert stand_ins


def test_scheme_that_the_tiles_do_not_follow_fails_the_run(
    run_tiny: RunTiny, stand_ins: list[Unseen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and tiles agree that P is not quantised."""
    within = tile_products.TileProducts.quantised_tile
    monkeypatch.setattr(
        tile_products.TileProducts,
        "quantised_tile",
        lambda self, slot, tile, x: x if slot.operand == "P" else within(self, slot, tile, x),
    )
    assert "pv.fprop.P: declared mxfp8_e4m3" in failure(run_tiny(*WORDS, expect=1))
    assert stand_ins


def test_hooked_tensors_come_from_the_tiles_and_gradients_from_the_kernels(
    run_tiny: RunTiny, stand_ins: list[Unseen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor within the bound marks the kernels' results."""
    words = (*(word for word in WORDS if word != "capture=off"), "capture.attn_weights=true")
    captures = []
    for factor in (1 + 2.0**-8, 1.0):
        monkeypatch.setattr(Unseen, "factors", (1.0, factor))
        capture = open_capture(run_tiny(*words).tensors)
        entries = capture.select(module="attention", iteration=1, micro_batch=0)
        captures.append(
            {(e.metadata["operation"], e.metadata["tensor"]): e.torch() for e in entries}
        )
    ours, theirs = captures
    assert stand_ins
    assert ours.keys() == theirs.keys()
    for key in (("forward", "attn_weights"), ("backward", "grad_scores"), ("backward", "grad_key")):
        assert torch.equal(ours[key], theirs[key]), key
    far = (ours["backward", "grad_query"].double() / theirs["backward", "grad_query"]).nanmedian()
    assert 1 + 2.0**-9 < far < 1 + 2.0**-7
