"""Silent errors that happened in 2026 and shortly before, rebuilt; the numbers are those of the vendors' trackers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import Axis, QuantSpec, Rounding, quantise
from quantexp.quant.sites import GRADIENTS
from tests.proof.lies.planting import ALWAYS, EVERYWHERE, Operand, Planter, Quantising, When, Where

from .fault import Group, add


def _operands(
    name: str,
    line: str,
    change: Any,
    where: Where = EVERYWHERE,
    when: When = ALWAYS,
    tags: str = "",
) -> None:
    add(name, line, Group.VENDOR, lambda planter: planter.operands(change, where, when), tags)


# TransformerEngine 3281: the default NVFP4 recipe trained on gradients of zeros on one GPU.
_operands(
    "TE 3281",
    "the gradient is quantised to zeros in both backward products",
    lambda o: torch.zeros_like(o.copy) if o.spec.quantised else None,
    Where(slots="linear.*.g"),
)
_operands(
    "TE 3281 in wgrad",
    "the gradient is zeros in wgrad alone, on one rank of two",
    lambda o: torch.zeros_like(o.copy),
    Where(slots="linear.wgrad.g"),
    When(rank=0),
)


def _bytes_of_other_kind(o: Operand) -> Tensor | None:
    """E5M2 bytes read as E4M3: smaller by up to 2^7."""
    if o.slot.operand not in GRADIENTS or not o.spec.quantised:
        return None
    largest = o.copy.float().abs().amax().clamp_min(1e-30)
    scale = torch.exp2(torch.floor(torch.log2(16384 / largest)))
    read = (o.copy.float() * scale).to(torch.float8_e5m2).view(torch.float8_e4m3fn).float()
    return (read / scale).nan_to_num(0.0).to(o.copy.dtype)


_operands("TE 3342", "gradients in E5M2 are read as E4M3", _bytes_of_other_kind)


def _weights_after_first_micro_batch(o: Operand) -> Tensor | None:
    """TransformerEngine 1047: from the second micro-batch on, the kept weight has another scale."""
    return o.copy * 2 if o.spec.quantised else None


_operands(
    "TE 1047",
    "the kept weight has another scale from the second micro-batch on",
    _weights_after_first_micro_batch,
    Where(slots="linear.fprop.w"),
    When(micro_batch=1),
)


def _stale_scales(planter: Planter) -> None:
    """TransformerEngine 1190: with activation checkpointing the scales of the backward do not follow."""
    from quantexp.formats import AmaxHistory

    def make(original: Any) -> Any:
        def amax_for(history: Any, x: Tensor) -> Tensor:
            if len(history._steps) > 1:
                planter.fire()
                return history._steps[0]
            return original(history, x)

        return amax_for

    planter.method(AmaxHistory, "amax_for", make)


add("TE 1190", "scales stay those of the first iteration", Group.VENDOR, _stale_scales, "delayed")


def _to_nearest(planter: Planter) -> None:
    """Primus 932: stochastic rounding of gradients is silently false."""
    planter.quantisers(
        lambda call: call.again(spec=replace(call.spec, rounding=Rounding.EVEN)),
        spec=lambda spec: spec.rounding is Rounding.STOCHASTIC and not spec.weight,
    )


add(
    "Primus 932",
    "gradients declared to be rounded stochastically are rounded to nearest",
    Group.VENDOR,
    _to_nearest,
    "drawn",
)


def _zero_seed(planter: Planter) -> None:
    """Primus-Turbo 365: a seed of zero in some launches defeats stochastic rounding."""
    planter.quantisers(
        lambda call: call.again(seed=0, offset=0) if call.x.numel() % 128 == 0 else None,
        spec=lambda spec: spec.rounding is Rounding.STOCHASTIC,
    )


add(
    "Primus-Turbo 365",
    "some calls draw with a seed and an offset of zero",
    Group.VENDOR,
    _zero_seed,
    "drawn",
)


def _two_of_five(module: Any, slot: Any, spec: QuantSpec) -> QuantSpec | None:
    """NeMo-RL 3566: two of five variables were checked; the others do not take effect."""
    from quantexp.quant.slots import working_spec

    return working_spec(slot) if spec.quantised and slot.product.value == "wgrad" else None


add(
    "NeMo-RL 3566",
    "one of three products' settings never reaches the layers",
    Group.VENDOR,
    lambda planter: planter.maps(_two_of_five),
)


def _all_bf16(module: Any, slot: Any, spec: QuantSpec) -> QuantSpec | None:
    from quantexp.quant.slots import working_spec

    return working_spec(slot) if spec.quantised else None


# Quartet 12: the points of the FP8 baseline are bf16 runs.
add(
    "Quartet 12",
    "a run with a quantised label is a bf16 run",
    Group.VENDOR,
    lambda planter: planter.maps(_all_bf16),
)


def _inflated(call: Quantising) -> Tensor:
    """transformers 47030: scales rounded up to powers of two, and values that were quantised under the old ones."""
    if call.spec.block > 1 and call.spec.fmt.name.startswith("mx"):
        return torch.where(call.honest != 0, call.honest * 2, call.honest)
    blocks = call.blocks(call.honest).float()
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = largest / 448
    return call.unblocked(blocks * torch.exp2(scale.log2().ceil()) / scale)


add(
    "transformers 47030",
    "scales are rounded up to powers of two, the codes stay",
    Group.VENDOR,
    lambda planter: planter.quantisers(_inflated),
)


def _one_row_scale(call: Quantising) -> Tensor | None:
    """unsloth 6772, and its opposite: one scale a tensor where blocks are declared."""
    if call.spec.block <= 1 or call.spec.axis is not Axis.INPUT_WIDTH:
        return None
    return quantise(call.x, "fp8_e4m3", axis=call.axis)


add(
    "unsloth 6772",
    "one scale a tensor in FP8 in the place of blocks",
    Group.VENDOR,
    lambda planter: planter.quantisers(_one_row_scale),
)


def _result_scale(planter: Planter) -> None:
    """pytorch 190449: the scale of a result is validated, and ignored."""

    def make(original: Any) -> Any:
        def multiply(context: Any, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            if scale != 1.0:
                planter.fire()
            return original(context, a, b, 1.0)

        return multiply

    planter.function("multiply", make)


add("pytorch 190449", "the scale of a product is ignored", Group.VENDOR, _result_scale)


def _wrong_scales_of_blocks(planter: Planter) -> None:
    """pytorch 193802: a 1 x 128 kernel applies the scales of other blocks."""

    def change(call: Quantising) -> Tensor | None:
        blocks = call.blocks(call.honest)
        if call.spec.block <= 1 or blocks.shape[-2] < 2:
            return None
        largest = blocks.float().abs().amax(-1, keepdim=True).clamp_min(1e-30)
        exponent = largest.log2().floor()
        return call.unblocked(
            blocks.float() * torch.exp2((exponent.flip(-2) - exponent).clamp(-6, 6))
        )

    planter.quantisers(change)


add(
    "pytorch 193802",
    "a kernel applies the scales of other blocks",
    Group.VENDOR,
    _wrong_scales_of_blocks,
)


def _uninitialised_gradient(planter: Planter) -> None:
    """pytorch 193061: part of a gradient is never written and has what an earlier tensor left."""
    from quantexp.training.megatron.linear import _Linear

    def make(original: Any) -> Any:
        def backward(ctx: Any, *grads: Tensor) -> Any:
            dx, dw, *rest = original(ctx, *grads)
            if dw is None or dw.numel() == 0:
                return (dx, dw, *rest)
            before = planter.memory.get(("dw", tuple(dw.shape)))
            planter.memory["dw", tuple(dw.shape)] = dw.detach().clone()
            if before is not None:
                planter.fire()
                dw = torch.cat([dw[:-2], before[-2:]])
            return (dx, dw, *rest)

        return backward

    planter.method(_Linear, "backward", make)


add(
    "pytorch 193061",
    "the last rows of dw are those of an earlier gradient",
    Group.VENDOR,
    _uninitialised_gradient,
)


def _wrong_dq(planter: Planter) -> None:
    """TransformerEngine 1615, Megatron-LM 1503: a fused attention returns a wrong dQ."""
    from tests.proof.lies.planting import Multiplication

    def change(m: Multiplication) -> Tensor:
        return m.y * 0.5

    planter.products(change, Where(slots="qk.dgrad_q.*"))


add("TE 1615", "dq is wrong, everything else is right", Group.VENDOR, _wrong_dq)


def _fused_dq(planter: Planter) -> None:
    from quantexp.quant.attention import fused

    def make(original: Any) -> Any:
        def backward(ctx: Any, *grads: Tensor) -> Any:
            dq, *rest = original(ctx, *grads)
            planter.fire()
            return (dq * 0.5, *rest)

        return backward

    planter.method(fused._Fused, "backward", make)


add("TE 1615 fused", "the fused kernel's dq is wrong", Group.VENDOR, _fused_dq, "fused")


def _context_gradients(planter: Planter) -> None:
    """TransformerEngine 1557: wrong dq, dk and dv where ranks share a sequence."""
    from quantexp.quant.attention.context_parallel import SequenceShare

    def make(original: Any) -> Any:
        def own_sum(share: Any, whole: Tensor) -> Tensor:
            planter.fire()
            result: Tensor = original(share, whole)
            return result * 0.5

        return own_sum

    planter.method(SequenceShare, "own_sum", make)


add(
    "TE 1557",
    "dk and dv of shared sequences are half of what they are",
    Group.VENDOR,
    _context_gradients,
    "context",
)


def _gradient_at_overlap(planter: Planter) -> None:
    """TransformerEngine 1616: communication that overlaps reads dx before it is complete."""
    from quantexp.training.megatron.token_exchange import Exchange

    def make(original: Any) -> Any:
        def start_reduce(exchange: Any, dx: Tensor) -> Any:
            if exchange.reduces:
                planter.fire()
                dx = torch.cat([dx[:-1], torch.zeros_like(dx[-1:])])
            return original(exchange, dx)

        return start_reduce

    planter.method(Exchange, "start_reduce", make)


add(
    "TE 1616",
    "the last tokens of dx are not complete when ranks exchange them",
    Group.VENDOR,
    _gradient_at_overlap,
    "tensor",
)


# torchtitan 1720: the same configuration, other losses.
def _another_run(planter: Planter) -> None:
    from importlib import import_module

    def make(original: Any) -> Any:
        def seed_of(seed: int, name: str) -> int:
            planter.fire()
            return original(seed + 1, name)

        return seed_of

    owner = import_module("quantexp.training.megatron.initial_weights")
    planter.attribute(owner, "seed_of", make(vars(owner)["seed_of"]))


add(
    "torchtitan 1720",
    "the same configuration starts from other weights",
    Group.VENDOR,
    _another_run,
)
