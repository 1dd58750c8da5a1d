"""The operations on tensors as custom operators of torch: `torch.ops.quantexp`.

Every operation has a function on plain tensors (see `torch_internals`). Any other tensor reaches it through torch's
dispatcher as an operator: torch.compile, torch.export and make_fx record one node, fake tensors have a shape, lazily
negated views are materialised, and `torch.func.vmap` takes each example by itself. An operator has no derivative; the
public functions give one to its result (`with_derivative_of`), because `torch.library.register_autograd` serves neither
`torch.func.grad` nor forward derivatives. A process that loads an exported program imports the operators with `from
quantexp.formats import quantise`.

An operator takes a specification as text, for instance "mxfp8_e4m3 scale_rule=rceil", and seeds as signed integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantexp.formats.spec import (
    AnySpec,
    QuantSpec,
    check_amax,
    check_draw,
    check_number,
    constant_for_dynamo,
    resolve,
)
from quantexp.formats.table import FORMATS
from quantexp.formats.types import Family, Rounding

#: What `operator` returns.
Operator = Callable[..., Any]

#: The options of a specification, in the order of its text.
_OPTIONS = (
    "block",
    "scale_rule",
    "rounding",
    "saturate",
    "scaling",
    "amax_target",
    "pre_scale",
)
_WRAP = 1 << 64


def operator(
    name: str,
    schema: str,
    work: Callable[..., Any],
    fake: Callable[..., Any],
    batched: Callable[..., tuple[Any, ...] | None] = lambda *arguments: None,
) -> Operator:
    """Register an operator.

    Args:
        name: its name in `torch.ops.quantexp`.
        schema: its arguments and results, without the name.
        work: computes it for plain tensors, into new tensors.
        fake: the same for shapes alone.
        batched: the arguments that compute a whole batch, which is the first axis of every tensor, in one call; None
            means one call for each example. It takes the arguments with the batch in front.
    """
    op: Any = torch.library.custom_op(f"quantexp::{name}", work, mutates_args=(), schema=schema)
    op.register_fake(fake)

    def over_batch(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        leaves, structure = pytree.tree_flatten(arguments)
        dims = pytree.tree_flatten(in_dims, is_leaf=lambda dim: dim is None)[0]
        in_front = [
            leaf if dim is None else leaf.movedim(dim, 0)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        whole = None
        if _is_batch_alone(leaves, dims):
            whole = batched(*pytree.tree_unflatten(in_front, structure))
        if whole is not None:
            results = op(*whole)
        elif info.batch_size == 0:
            results = _without_examples(op, in_front, dims, structure)
        else:
            examples = [
                op(*pytree.tree_unflatten(_example(in_front, dims, index), structure))
                for index in range(info.batch_size)
            ]
            results = pytree.tree_map(lambda *parts: torch.stack(parts), *examples)
        return results, pytree.tree_map(lambda _: 0, results)

    op.register_vmap(over_batch)
    registered: Operator = op
    return registered


def _is_batch_alone(leaves: Sequence[Any], dims: Sequence[int | None]) -> bool:
    """Whether every tensor has a batch."""
    return all(
        dim is not None for leaf, dim in zip(leaves, dims, strict=True) if isinstance(leaf, Tensor)
    )


def _example(in_front: Sequence[Any], dims: Sequence[int | None], index: int) -> list[Any]:
    return [leaf if dim is None else leaf[index] for leaf, dim in zip(in_front, dims, strict=True)]


def _without_examples(
    op: Operator, in_front: Sequence[Any], dims: Sequence[int | None], structure: Any
) -> Any:
    """The results for a batch of none: as for one of ones, without it."""
    one = [
        leaf if dim is None else leaf.new_ones((1, *leaf.shape[1:]))
        for leaf, dim in zip(in_front, dims, strict=True)
    ]
    results = op(*pytree.tree_unflatten(_example(one, dims, 0), structure))
    return pytree.tree_map(lambda result: result.new_empty((0, *result.shape)), results)


def with_blocks_of_examples(
    x: Tensor, spec: str, axis: int, *others: Any
) -> tuple[Tensor, str, int, Any] | None:
    """The arguments for a batch if no example's blocks depend on another's, for `operator`."""
    options = spec_of(spec)
    is_alone = options.fmt.family is Family.MX and options.rounding is not Rounding.STOCHASTIC
    return (x, spec, axis + 1, *others) if is_alone and x.ndim > 1 else None


def with_derivative_of(x: Tensor, y: Tensor) -> Tensor:
    """The values of y, with the identity as its derivative with respect to x: the straight-through estimator.

    Raises:
        RuntimeError: inside `torch.func.functionalize`, which would drop the derivative.
    """
    if not torch.compiler.is_compiling() and torch._is_functional_tensor(x):
        raise RuntimeError(
            "torch.func.functionalize drops a straight-through derivative: differentiate inside of it, as in "
            "functionalize(grad(f)), or leave straight_through away"
        )
    result = x.clone()
    result.detach().copy_(y)
    return result


@constant_for_dynamo
def text_of(
    fmt: AnySpec,
    *,
    has_amax: bool | None = None,
    has_seed: bool | None = None,
    has_offset: bool = False,
    **options: Any,
) -> str:
    """The specification that `resolve` returns, as an operator's argument.

    `has_amax` and `has_seed` are None for a function without these arguments.

    Raises:
        ValueError: its format is not one of the table, which has no name to find it by; or as `check_amax` and
            `check_draw`.
    """
    spec = resolve(fmt, **options)
    if has_amax is not None:
        check_amax(spec, has_amax)
    if has_seed is not None:
        check_draw(spec, 0 if has_seed else None, 0 if has_offset else None)
    name = spec.fmt.name
    if FORMATS.get(name) is not spec.fmt:
        raise ValueError(
            f"the format {name!r} is not in quantexp.formats.FORMATS: torch cannot compile, trace or transform it; "
            "call the function outside of them"
        )
    default = resolve(name)
    values = {option: getattr(spec, option) for option in _OPTIONS}
    changed = [
        f"{option}={value}" for option, value in values.items() if value != getattr(default, option)
    ]
    return " ".join([name, *changed])


def operator_arguments(
    fmt: AnySpec,
    axis: int,
    amax: Tensor | None,
    seed: int | None,
    offset: int | None,
    **options: Any,
) -> tuple[str, int, Tensor | None, int | None, int | None]:
    """The arguments of a call after x, as an operator takes them.

    Raises:
        ValueError: as `text_of` and `check_number`.
    """
    text = text_of(
        fmt,
        has_amax=amax is not None,
        has_seed=seed is not None,
        has_offset=offset is not None,
        **options,
    )
    return text, axis, amax, signed("seed", seed), signed("offset", offset)


@cache
def spec_of(text: str) -> QuantSpec:
    """The specification of a text."""
    name, *options = text.split()
    return resolve(
        name, **{key: _VALUES.get(key, str)(value) for key, value in map(_pair, options)}
    )


def _pair(option: str) -> tuple[str, str]:
    key, _, value = option.partition("=")
    return key, value


_VALUES: dict[str, Callable[[str], Any]] = {
    "block": int,
    "saturate": lambda value: value == "True",
    "amax_target": float,
    "pre_scale": float,
}


def signed(name: str, number: int | None) -> int | None:
    """A seed or an offset as an operator's argument, an int64 of the same bits.

    Raises:
        ValueError: as `check_number`.
    """
    if number is None:
        return None
    check_number(name, number)
    return number if number < _WRAP // 2 else number - _WRAP


def unsigned(number: int | None) -> int | None:
    """The number in [0, 2^64) of an operator's argument."""
    return None if number is None else number % _WRAP
