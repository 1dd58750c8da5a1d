"""The amax that determines a tensor's scale, over all ranks that hold parts of the tensor.

    amax = max over ranks of max |x|        x the part of a rank, after its Hadamard transform if there is one

Training registers the maximum over ranks (`use_reduction`): over the tensor- and context-parallel ranks for everything
but routed experts, over the expert-tensor-parallel ranks for those. A tensor that every rank holds whole has the same
amax on each, so one rule serves both. Every code path that quantises or judges an operand calls `whole_amax`, or
`reduced` for an amax that it has gathered itself. Ranks of a group must therefore call the products in the same order.
Without a registered reduction every tensor is whole, and nothing is computed here.

An empty operand, of an expert without tokens, is not reduced: the ranks of a group hold parts of the same tokens, so it
is empty on all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantexp.formats import QuantSpec, Scaling, Transform, finite_amax, hadamard
from quantexp.quant.precision import ModuleId
from quantexp.quant.step_state import current_state

#: The elementwise maximum of amaxes (float32, of any shape) over the ranks that hold parts of a module's tensors.
ReduceAmax = Callable[[ModuleId, Tensor], Tensor]

_reduce: ReduceAmax | None = None


@contextlib.contextmanager
def use_reduction(reduce: ReduceAmax) -> Iterator[None]:
    """Reduce the amaxes of operands inside, including those of backward passes on other threads."""
    global _reduce
    before = _reduce
    _reduce = reduce
    try:
        yield
    finally:
        _reduce = before


def is_reduced(spec: QuantSpec) -> bool:
    """Whether the operand's scale currently depends on an amax over several ranks."""
    return _reduce is not None and follows_own_amax(spec)


def reduced(module: ModuleId, amax: Tensor) -> Tensor:
    """An amax of a rank's part of a module's tensor as that of the whole tensor."""
    return amax if _reduce is None else _reduce(module, amax)


def whole_amax(module: ModuleId, x: Tensor, spec: QuantSpec, axis: int) -> Tensor | None:
    """The amax that must scale x in place of x's own; None if that is right, or if x is empty."""
    if not is_reduced(spec) or x.numel() == 0:
        return None
    return reduced(module, own_amax(x, spec, axis))


def follows_own_amax(spec: QuantSpec) -> bool:
    """Whether the operand's scale currently depends on the amax of its whole tensor."""
    if spec.scaling is Scaling.DELAYED:
        return current_state().amax(spec) is None
    return spec.is_scaled


def own_amax(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """The amax that determines such a scale, of the Hadamard transform if there is one; 0-dim float32."""
    return finite_amax(transformed(x, spec, axis))


def transformed(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """`x` after the operand's Hadamard transform along `axis`, in float32; `x` itself if there is none."""
    transform = transform_of(spec, x.device)
    if transform is None:
        return x
    return hadamard(x, axis=axis, **vars(transform))


def transform_of(spec: QuantSpec, device: torch.device) -> Transform | None:
    """The operand's Hadamard transform in this micro-batch; None if there is none."""
    if not spec.is_transformed:
        return None
    return Transform(spec.hadamard_block, current_state().signs(spec, device), spec.left)
