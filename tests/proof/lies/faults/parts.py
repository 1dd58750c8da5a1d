"""Operands that are sums of parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.formats.spec import Part, resolve
from tests.proof.lies.planting import ALWAYS, Planter, When

from .fault import Group, add


def _made(
    change: Callable[[Any, Tensor, QuantSpec, int, Callable[..., Tensor]], Tensor],
    when: When = ALWAYS,
) -> Callable[[Planter], None]:
    """Replace how an operand in parts is made; the last argument makes it as it was."""

    def plant(planter: Planter) -> None:
        def make(original: Any) -> Any:
            def made(
                module: Any, x: Tensor, spec: QuantSpec, axis: int, out: Tensor | None = None
            ) -> Tensor:
                if not spec.parts or not when.holds(planter.place):
                    y: Tensor = original(module, x, spec, axis, out)
                    return y
                planter.fire()
                return change(module, x, spec, axis, original)

            return made

        planter.function("make_operand", make)

    return plant


def _not_split(planter: Planter) -> None:
    """Nothing is taken out: the parts are zeros."""

    def make(original: Any) -> Any:
        def take_part(x: Tensor, part: Part) -> Tensor:
            planter.fire()
            return torch.zeros_like(x)

        return take_part

    planter.function("take_part", make)


def _by_lapack(planter: Planter) -> None:
    """The low rank that LAPACK's singular vectors give, which is a better one."""

    def make(original: Any) -> Any:
        def low_rank_part(x: Tensor, rank: int) -> Tensor:
            planter.fire()
            u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
            scaled = u[:, :rank] * s[:rank]
            return (scaled[..., None] * vh[:rank]).sum(1).float()

        return low_rank_part

    planter.function("low_rank_part", make)


def _before(spec: QuantSpec) -> int:
    """The parts that lie before what remains."""
    return sum(part.spec is not None and not part.from_error for part in spec.parts)


def _whole(
    module: Any, x: Tensor, spec: QuantSpec, axis: int, original: Callable[..., Tensor]
) -> Tensor:
    """The parts beside the whole operand, rounded, which still has them in it."""
    pieces = list(original(module, x, spec, axis).chunk(spec.num_pieces, axis))
    first = _before(spec)
    pieces[first] = original(module, x, replace(spec, parts=()), axis)
    return torch.cat(pieces, axis)


def _other_format(
    module: Any, x: Tensor, spec: QuantSpec, axis: int, original: Callable[..., Tensor]
) -> Tensor:
    """Parts rounded to mxfp4."""
    mxfp4 = replace(resolve("mxfp4"), axis=spec.axis, weight=spec.weight)
    parts = tuple(replace(part, spec=mxfp4) for part in spec.parts)
    return original(module, x, replace(spec, parts=parts), axis)


def _alone(
    module: Any, x: Tensor, spec: QuantSpec, axis: int, original: Callable[..., Tensor]
) -> Tensor:
    """What remains is multiplied, and the parts are left out: zeros in their place."""
    pieces = list(original(module, x, spec, axis).chunk(spec.num_pieces, axis))
    first = _before(spec)
    kept = [each if index == first else each * 0 for index, each in enumerate(pieces)]
    return torch.cat(kept, axis)


for name, line, plant in (
    ("parts not split off", "nothing is taken out of an operand", _not_split),
    ("remainder with its parts", "what remains has the parts still in it", _made(_whole)),
    ("parts in another format", "parts are rounded to mxfp4", _made(_other_format)),
    ("parts left out", "only what remains is multiplied", _made(_alone)),
    ("parts left out from 3", "the same from iteration 3", _made(_alone, When(since=3))),
):
    add(name, line, Group.SLOT, plant, "parts")
add(
    "low rank of LAPACK",
    "the low rank is that of the exact singular vectors",
    Group.SLOT,
    _by_lapack,
    "low-rank",
)
