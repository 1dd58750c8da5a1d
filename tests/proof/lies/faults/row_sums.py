"""Attention whose rows are divided after the product with v, and whose delta is of dO and o."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.types import STOCK
from quantexp.quant.attention import row_sums
from quantexp.quant.sites import FPROP_P
from tests.proof.lies.planting import ALWAYS, Planter, When

from .fault import Group, add


def _made(
    change: Callable[..., tuple[Tensor, Tensor]], when: When = ALWAYS
) -> Callable[[Planter], None]:
    """Replace how exp(S - m) and its row sums are made; the first argument makes them as they were."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def forward(module: Any, S: Tensor, hidden: Tensor | None, factor: float | None) -> Any:
                if not when.holds(planter.place):
                    return original(module, S, hidden, factor)
                planter.fire()
                return change(lambda *own: original(module, *own), S, hidden, factor)

            return forward

        planter.method(row_sums.Exponentials, "forward", make)

    return plant


def _normalised(make: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """P itself, and sums of 1."""
    E, sums = make(*args)
    return (E.float() / sums).to(E.dtype), torch.ones_like(sums)


def _not_raised(make: Any, S: Tensor, hidden: Tensor | None, factor: float | None) -> Any:
    return make(S, hidden, None)


def _always_raised(make: Any, S: Tensor, hidden: Tensor | None, factor: float | None) -> Any:
    """Of every row with a positive maximum."""
    E, sums = make(S, hidden, None)
    largest = row_sums.masked(S, hidden).amax(-1, keepdim=True).clamp_min(0.0)
    shift = torch.exp(-((factor or 2.0) - 1) * largest)
    return (E.float() * shift).to(E.dtype), sums * shift


def _of_rounded(make: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """The sums of exp(S - m) once that is rounded."""
    E, _ = make(*args)
    return E, E.float().sum(-1, keepdim=True)


def _p_multiplied(planter: Planter) -> None:
    """exp(S - m) is made and shown, and the product has P."""
    from quantexp.quant.attention.tile_products import TileProducts

    def plain(original: Any) -> Any:
        def context(call: Any, P: Tensor, v: Tensor, exponentials: Any = None, *more: Any) -> Any:
            if exponentials is not None:
                planter.fire()
                exponentials = P.detach(), torch.ones_like(exponentials[1])
            return original(call, P, v, exponentials, *more)

        return context

    def tiled(original: Any) -> Any:
        def multiplied(work: Any, S: Tensor, tile: Any) -> Any:
            P, E, sums = original(work, S, tile)
            if sums is None:
                return P, E, sums
            planter.fire()
            return P, P, torch.ones_like(sums)

        return multiplied

    planter.function("context", plain)
    planter.method(TileProducts, "multiplied", tiled)


def _divided(change: Callable[[Tensor], Tensor]) -> Callable[[Planter], None]:
    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def divided(product: Tensor, sums: Tensor) -> Any:
                planter.fire()
                return original(product, change(sums))

            return divided

        planter.function("divided", make)

    return plant


def _delta(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], when: When = ALWAYS) -> Any:
    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def see(delta: Any, dO: Tensor, o: Tensor) -> None:
                if when.holds(planter.place):
                    planter.fire()
                    dO, o = change(dO, o)
                original(delta, dO, o)

            return see

        planter.method(row_sums.OutputSums, "see", make)

    return plant


def _delta_of_p(planter: Planter) -> None:
    """The softmax's own derivative, with the sums of P dP."""
    from quantexp.training.megatron.attention import SchemeSoftmax

    def make(original: Any) -> Any:
        def forward(module: Any, S: Any, mask: Any, offset: Any = None, delta: Any = None) -> Any:
            if delta is not None:
                planter.fire()
            return original(module, S, mask, offset)

        return forward

    planter.method(SchemeSoftmax, "forward", make)


def _stock_map(planter: Planter) -> None:
    """The precision map has Megatron's softmax."""
    planter.maps(lambda _, slot, spec: replace(spec, softmax=STOCK) if slot == FPROP_P else None)


def _in_fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


for name, line, plant in (
    ("P normalised first", "P is divided before it is rounded", _made(_normalised)),
    ("P normalised first from 3", "the same from iteration 3", _made(_normalised, When(since=3))),
    ("P multiplied", "exp(S - m) is made, and P multiplied", _p_multiplied),
    ("sums of rounded exp", "row sums are those of the rounded exp(S - m)", _made(_of_rounded)),
    ("rows not divided", "the product with v is not divided", _divided(torch.ones_like)),
    ("divided by 1.02 of the sums", "rows are divided by too much", _divided(lambda s: s * 1.02)),
    ("softmax of another map", "the map has Megatron's softmax", _stock_map),
):
    add(name, line, Group.RESULT, plant, "row-sums")
add("maximum not raised", "m is the maximum", Group.RESULT, _made(_not_raised), "raised")
add(
    "maximum always raised",
    "m is raised in each row",
    Group.RESULT,
    _made(_always_raised),
    "raised",
)
add("delta of P", "delta has the sums of P dP", Group.RESULT, _delta_of_p, "delta")
add(
    "delta of o in fp8",
    "delta has o in fp8, from iteration 2",
    Group.RESULT,
    _delta(lambda dO, o: (dO, _in_fp8(o)), When(since=2)),
    "delta",
)
