"""Shards on several ranks have the scales of the whole tensor: their operands are slices of one process's operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.formats import Axis, resolve
from quantexp.quant.attention import fused, tiled, tiles
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.hooks import hook_operands
from quantexp.quant.linear import (
    dgrad,
    fprop,
    gradient_copies,
    input_copies,
    wgrad,
)
from quantexp.quant.multiply import clipped_gradient
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.sites import FPROP_W, FPROP_X
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.quant.weight_cache.weights import WeightCopies

from .attention.kernels.tiled_cases import far, fresh, softmax
from .ranks import Ranks

FC1, ATTENTION = ModuleId(0, "fc1"), ModuleId(0, "attention")
#: Formats with a scale a tensor, and two whose amax is that of a transform or of a step without history.
SCALED = {
    "hifp8": ("quant=linear_hifp8",),
    "fp8": ("quant=more/linear_fp8",),
    "nvfp4": ("quant=more/linear_nvfp4",),
    "delayed": ("quant=more/linear_hifp8_delayed",),
    "transformed": (
        "quant=linear_hifp8",
        "quant.linear.hadamard=deterministic",
        "quant.linear.hadamard_block=16",
    ),
}
FULL = {
    "hifp8": ("quant=more/FA_full_hifp8", "quant/pv=hifp8"),
    "fp8": ("quant=more/FA_full_fp8", "quant/pv=fp8"),
    "nvfp4": ("quant=more/FA_full_nvfp4", "quant/pv=nvfp4"),
}
#: What the fused kernel can multiply, under exact scales.
EXACT = ("quant=FA_hifp8", "quant.qk={format: hifp8, scaling: exact}")
Operands = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    with use_step_state(StepState(1)):
        yield


def declared(module: ModuleId, *words: str) -> ModulePrecision:
    experiment = compose(["training=fast", *words], None, {})
    return precision_map(experiment.model, experiment.quant)[module]


def normal(*shape: int, seed: int = 1) -> Tensor:
    """The second half along the last axis is 9 times as large: the scales of halves differ."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x[..., shape[-1] // 2 :] *= 9
    return x


def half(x: Tensor, rank: int, axis: int) -> Tensor:
    return x.chunk(2, dim=axis)[rank].contiguous()


class Recorded:
    """The quantised operands of each rank by slot."""

    def __init__(self, rank: Callable[[], int]) -> None:
        self.by_rank: dict[int, Operands] = {}
        self._rank = rank

    def __call__(self, precision: Any, slot: Any, x: Any, quantised: Any, layout: Any, /) -> None:
        self.by_rank.setdefault(self._rank(), {})[str(slot)] = layout(quantised).clone()


def of_layer(precision: ModulePrecision, x: Tensor, w: Tensor, g: Tensor) -> None:
    """One micro-batch of a linear layer, as training calls the products."""
    copies = WeightCopies()
    with copies.step(several=True):
        one, two = input_copies(precision, x, None, copies.buffers)
        fprop(precision, x, w, quantised_x=one, quantised_w=copies.for_fprop(precision, w, True))
        one, again = gradient_copies(precision, g, None, copies.buffers)
        dgrad(precision, g, w, quantised_g=one, quantised_w=copies.for_dgrad(precision, w))
        wgrad(precision, g, x, quantised_g=again, quantised_x=two)


def operands_of_ranks(
    work: Callable[[int], object], is_reduced: bool = True
) -> tuple[dict[int, Operands], Ranks]:
    ranks = Ranks(2)
    recorded = Recorded(lambda: ranks.rank)
    with hook_operands(recorded):
        ranks.run(work, is_reduced=is_reduced)
    return recorded.by_rank, ranks


def operands_of_one(work: Callable[[], object]) -> Operands:
    recorded = Recorded(lambda: 0)
    with hook_operands(recorded):
        work()
    return recorded.by_rank[0]


@pytest.mark.parametrize("words", SCALED.values(), ids=SCALED)
def test_operands_of_a_column_parallel_layer_are_slices_of_the_whole(
    words: tuple[str, ...],
) -> None:
    precision = declared(FC1, *words)
    x, w, g = normal(64, 2, 64), normal(64, 96, seed=2).t().contiguous(), normal(64, 2, 96, seed=3)
    whole = operands_of_one(lambda: of_layer(precision, x, w, g))

    def work(rank: int) -> None:
        of_layer(precision, x, half(w, rank, 0), half(g, rank, 2))

    with use_step_state(StepState(1)):
        by_rank, _ = operands_of_ranks(work)
    assert len(whole) == 6
    for rank, operands in by_rank.items():
        for slot, ours in operands.items():
            axis = {"x": None, "w": 0, "g": -1}[slot[-1]]
            theirs = whole[slot] if axis is None else half(whole[slot], rank, axis)
            assert torch.equal(ours, theirs), slot
    with use_step_state(StepState(1)):
        apart, _ = operands_of_ranks(work, is_reduced=False)
    assert not torch.equal(apart[0]["linear.fprop.w"], by_rank[0]["linear.fprop.w"])


def of_attention(
    path: str, precision: ModulePrecision, qkv: list[Tensor], dO: Tensor
) -> list[Tensor]:
    """Output and gradients of q, k and v, [T, B, heads, D]."""
    q, k, v = leaves = fresh(qkv)
    T, B, H, _ = q.shape
    call = AttentionCall(precision, 0.2)
    if path == "plain":
        P = softmax(scores(call, q, k).view(B, H, T, T), None).reshape(B * H, T, T)
        o = context(call, P, v)
    elif path == "tiled":
        o = tiled.attention(call, q, k, v, lambda S, start: softmax(S, None, start))
    else:
        o = fused.attention(call, q, k, v)
    if path != "fused":
        o = o.view(B, H, T, -1).permute(2, 0, 1, 3)
    o.backward(dO)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [o.detach(), *gradients]


def heads() -> tuple[list[Tensor], Tensor]:
    """q, k, v with 4 heads and dO, each of two heads 9 times as large; q small, so that no P is one-hot."""
    tensors = [
        normal(64, 2, 32, 4, seed=seed).float().transpose(2, 3).contiguous() for seed in range(4)
    ]
    return [tensors[0] / 16, *tensors[1:3]], tensors[3]


@pytest.mark.parametrize(
    ("path", "name"),
    [*((path, name) for path in ("plain", "tiled") for name in FULL), ("fused", "hifp8")],
)
def test_heads_of_each_rank_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    """In float32 a product of fewer heads may be summed in another order: 1e-5, as in `test_tiled`."""
    monkeypatch.setattr(tiles, "ROWS", 32)
    precision = declared(ATTENTION, *(EXACT if path == "fused" else FULL[name]))
    qkv, dO = heads()
    whole = of_attention(path, precision, qkv, dO)

    def work(rank: int) -> list[Tensor]:
        return of_attention(path, precision, [half(x, rank, 2) for x in qkv], half(dO, rank, 2))

    def distance(results: list[list[Tensor]]) -> float:
        """The largest of any tensor of a rank."""
        return max(
            far(ours, half(theirs, rank, 2))
            for rank, tensors in enumerate(results)
            for ours, theirs in zip(tensors, whole, strict=True)
        )

    assert distance(Ranks(2).run(work)) < 1e-5
    assert distance(Ranks(2).run(work, is_reduced=False)) > 1e-3


def test_a_clipped_gradient_has_the_scale_of_the_whole() -> None:
    """Scales of 125 and 2000 = 1000 / amax: an element above 448 / scale saturates."""
    spec = resolve("fp8_e4m3", amax_target=1000.0)
    spec = replace(spec, clip_gradient=True, axis=Axis.INPUT_WIDTH)
    precision = ModulePrecision(FC1, {FPROP_X: spec})
    x = torch.tensor([[0.5, 0.25, 1.0, 8.0]])

    def work(rank: int) -> Tensor:
        part = half(x, rank, 1)
        return clipped_gradient(precision, FPROP_X, torch.ones_like(part), part)

    together = torch.cat(Ranks(2).run(work), 1)
    apart = torch.cat(Ranks(2).run(work, is_reduced=False), 1)
    assert together.tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert apart.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_nothing_is_reduced_without_a_scale_of_a_tensor_or_for_an_empty_operand() -> None:
    x, w, g = normal(64, 1, 64), normal(96, 64), normal(64, 1, 96)
    hifp8, mxfp8 = (declared(FC1, f"quant=linear_{name}") for name in ("hifp8", "mxfp8"))
    _, ranks = operands_of_ranks(lambda _: of_layer(mxfp8, x, w, g))
    assert ranks.reductions == []
    _, ranks = operands_of_ranks(lambda _: of_layer(hifp8, x[:0, 0], w, g[:0, 0]))
    assert ranks.reductions == [(FC1, ())], "the weight, whose copy serves both products"
    _, ranks = operands_of_ranks(lambda _: of_layer(hifp8, x, w, g))
    assert ranks.reductions == [(FC1, ())] * 3


def test_a_delayed_scale_with_history_is_not_reduced() -> None:
    precision = declared(FC1, *SCALED["delayed"])
    x, w, g = normal(64, 1, 64), normal(96, 64), normal(64, 1, 96)
    with use_step_state(StepState(1)) as state:
        _, ranks = operands_of_ranks(lambda _: of_layer(precision, x, w, g))
        assert len(ranks.reductions) > 0
        state.finish()
        _, ranks = operands_of_ranks(lambda _: of_layer(precision, x, w, g))
        assert ranks.reductions == []


def test_a_weight_outside_a_step_has_the_scale_of_the_whole() -> None:
    precision = declared(FC1, "quant=more/linear_fp8")
    w = normal(64, 96, seed=2).t().contiguous()
    whole = WeightCopies().for_fprop(precision, w, dgrad_follows=True)
    for product in ("for_fprop", "for_dgrad"):

        def work(rank: int, product: str = product) -> Tensor:
            copies = WeightCopies()
            rest = (True,) if product == "for_fprop" else ()
            result: Tensor = getattr(copies, product)(precision, half(w, rank, 0), *rest)
            return result

        assert torch.equal(torch.cat(Ranks(2).run(work)), whole)
    assert precision.spec(FPROP_W).is_scaled
