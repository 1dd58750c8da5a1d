"""An expert's rows of several micro-batches at once, against one micro-batch after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.formats import Axis, resolve
from quantexp.quant.hooks import hook_operands
from quantexp.quant.linear import (
    clipped_input,
    dgrad,
    fprop,
    gradient_copies,
    input_copies,
    wgrad,
)
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.rows import Rows
from quantexp.quant.sites import DGRAD_G, DGRAD_W, FPROP_X, Operand, Slot, dim_of
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.quant.weight_cache.buffers import Buffers
from tests.quant.attention.kernels.tiled_cases import far
from tests.quant.ranks import Ranks

EXPERT = ModuleId(0, "expert0-fc1")
SCHEMES = {
    "mxfp4": ("quant=linear_mxfp4",),
    "hifp8": ("quant=linear_hifp8",),
    "fp8": ("quant=more/linear_fp8",),
    "nvfp4": ("quant=more/linear_nvfp4",),
    "delayed": ("quant=more/linear_hifp8_delayed",),
    "exact, reused": (
        "quant=linear_hifp8",
        "quant.linear.scaling=exact",
        "quant.linear.wgrad.x.format=reuse",
    ),
    "stochastic": ("quant=linear_mxfp4", "quant.linear.rounding=stochastic"),
    "stochastic hifp8": ("quant=linear_hifp8", "quant.linear.rounding=stochastic"),
    "stochastic, reused": (
        "quant=linear_mxfp4",
        "quant.linear.rounding=stochastic",
        "quant.linear.wgrad.x.format=reuse",
    ),
    "of forward": ("quant=more/linear_fp8", "quant.linear.of=forward"),
    "stored": ("quant=more/linear_fp8", "quant.linear.of=mxfp4"),
    "stored, of one scale": (
        *("quant=more/linear_fp8", "quant.linear.of=nvfp4"),
        "quant.linear.wgrad.x.of=forward",
    ),
    "stochastic, of forward": (
        "quant=linear_mxfp4",
        "quant.linear={of: forward, rounding: stochastic}",
    ),
    "drawn forward alone": (
        "quant=linear_mxfp4",
        "quant.linear={of: forward, fprop: {x: {rounding: stochastic}, w: {rounding: stochastic}}}",
    ),
    "random signs": ("quant=more/linear_mxfp4_sr_rht",),
    "transform": ("quant=more/linear_mxfp4_hadamard",),
    "stochastic transform of one scale": (
        "quant=linear_hifp8",
        "quant.linear={rounding: stochastic, hadamard: random, hadamard_block: 16}",
    ),
}
#: Schemes whose weight is another one in each micro-batch: a product for each source.
WITH_WEIGHTS = {
    "stochastic": ("fprop", "dgrad"),
    "stochastic hifp8": ("fprop", "dgrad"),
    "stochastic, reused": ("fprop", "dgrad"),
    "stochastic, of forward": ("fprop", "dgrad"),
    "drawn forward alone": ("fprop", "dgrad"),
    "random signs": ("dgrad",),
    "stochastic transform of one scale": ("fprop", "dgrad"),
}
#: Iteration and micro-batch of this rank, and of the two sources.
OWN, SOURCES = (3, 6), (5, 6)
Products = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    with use_step_state(StepState(1, *OWN)):
        yield


@cache
def declared(*words: str) -> ModulePrecision:
    """Those of a dense layer, as one of an expert."""
    experiment = compose(["training=fast", *words], None, {})
    precision = precision_map(experiment.model, experiment.quant)[ModuleId(0, "fc1")]
    return replace(precision, module=EXPERT)


def expert() -> tuple[Rows, Tensor, Tensor, Tensor]:
    """170 rows of 2 sources with 2 sequences each, mixed; x and g of the second source are 7 times as large.

    The second source's sequences are longer, so that it alone decides where the blocks of a transform end.
    """
    generator = torch.Generator().manual_seed(1)
    sequence = torch.randint(0, 5, (170,), generator=generator).clamp(max=3)
    x, w, g = (torch.randn(n, m, generator=generator) for n, m in ((170, 64), (96, 64), (170, 96)))
    for tensor in (x, g):
        tensor[sequence >= 2] *= 7
    return Rows(sequence, 4, (-1, 0)), x, w, g


def products(
    precision: ModulePrecision, rows: Rows, x: Tensor, w: Tensor, g: Tensor, *, copied: bool
) -> Products:
    """y, dx and dw, as training multiplies them with and without copies."""
    first: Any = None
    second: Any = None
    if copied:
        first = input_copies(precision, x, rows, Buffers())
        second = gradient_copies(precision, g, rows, Buffers())
    x_fprop, x_wgrad = first or (None, None)
    g_dgrad, g_wgrad = second or (None, None)
    y = fprop(precision, x, w, rows, quantised_x=x_fprop)
    dx = dgrad(precision, g, w, rows, quantised_g=g_dgrad)
    return y, dx, wgrad(precision, g, x, rows, quantised_g=g_wgrad, quantised_x=x_wgrad)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_sources_together_are_sources_one_by_one(name: str, copied: bool) -> None:
    """In float32, where products of other extents may add in another order: 1e-6, as 170 terms err by 2^-24 each."""
    precision = declared(*SCHEMES[name])
    rows, x, w, g = expert()
    y, dx, dw = products(precision, rows, x, w, g, copied=copied)
    total = torch.zeros_like(dw)
    for source in range(2):
        own = rows.sequence // 2 == source
        alone = Rows(rows.sequence[own] % 2, 2)
        with use_step_state(StepState(1, OWN[0], SOURCES[source])):
            y_1, dx_1, dw_1 = products(precision, alone, x[own], w, g[own], copied=copied)
        assert far(y[own], y_1) < 1e-6
        assert far(dx[own], dx_1) < 1e-6
        total += dw_1
    assert far(dw, total) < 1e-6
    if name in ("fp8", "nvfp4", "exact, reused"):
        one = products(precision, Rows(rows.sequence, 4), x, w, g, copied=copied)
        assert far(one[0], y) > 1e-4, "one scale for both"


@pytest.mark.parametrize("name", ["fp8", "transform", "random signs", "stochastic"])
def test_source_without_rows_changes_nothing(name: str) -> None:
    precision = declared(*SCHEMES[name])
    _, x, w, g = expert()
    rows = Rows(torch.arange(len(x)) % 2, 4, (0, 1))
    with_empty = products(precision, rows, x, w, g, copied=True)
    without = products(precision, Rows(rows.sequence, 2), x, w, g, copied=True)
    assert all(far(a, b) < 1e-6 for a, b in zip(with_empty, without, strict=True))


def test_hooks_receive_all_rows_and_the_weight_of_this_ranks_micro_batch() -> None:
    precision = declared(*SCHEMES["random signs"])
    rows, _, w, g = expert()
    shown: list[tuple[Slot, Tensor]] = []
    with hook_operands(lambda _, slot, x, quantised, layout: shown.append((slot, quantised))):
        dgrad(precision, g, w, rows)
    spec = precision.spec(DGRAD_W)
    assert [slot for slot, _ in shown] == [DGRAD_G, DGRAD_W]
    assert shown[0][1].shape == g.shape
    assert torch.equal(shown[1][1], quantise_operand(w, spec, dim_of(Operand.W, spec)))


def test_amaxes_of_all_sources_are_reduced_at_once() -> None:
    """And none for an expert without rows."""
    precision = declared(*SCHEMES["fp8"])
    rows, x, _, _ = expert()
    ranks = Ranks(2)
    ranks.run(lambda _: input_copies(precision, x, rows, Buffers()))
    assert ranks.reductions == [(EXPERT, (2,))]
    none = Rows(torch.zeros(0, dtype=torch.int64), 4, (0, 1))
    ranks = Ranks(2)
    ranks.run(lambda _: input_copies(precision, x[:0], none, Buffers()))
    assert ranks.reductions == []


def test_a_delayed_scale_with_history_serves_all_sources() -> None:
    precision = declared(*SCHEMES["delayed"])
    rows, x, w, g = expert()
    with use_step_state(StepState(1)) as state:
        products(precision, rows, x, w, g, copied=True)
        state.finish()
        together = products(precision, rows, x, w, g, copied=True)
        one = products(precision, Rows(rows.sequence, 4), x, w, g, copied=True)
    assert all(torch.equal(a, b) for a, b in zip(together, one, strict=True))


def test_a_clipped_gradient_has_the_scale_of_each_source() -> None:
    """Scales of 1000 / amax: of an element above 448 / scale the gradient is 0."""
    spec = replace(resolve("fp8_e4m3", amax_target=1000.0), clip_gradient=True)
    precision = ModulePrecision(EXPERT, {FPROP_X: replace(spec, axis=Axis.INPUT_WIDTH)})
    x = torch.tensor([[0.5, 0.125], [1.0, 8.0]])
    rows = Rows(torch.tensor([0, 1]), 2, (0, 1))
    clipped = clipped_input(precision, torch.ones_like(x), x, rows)
    assert clipped.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    together = clipped_input(precision, torch.ones_like(x), x, None)
    assert together.tolist() == [[1.0, 1.0], [1.0, 0.0]]
