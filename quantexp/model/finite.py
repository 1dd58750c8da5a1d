"""Which values are NaN or Inf, and the refusal of a checkpoint that has one. Needs no torch until it sees a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


def is_finite(x: Tensor) -> bool:
    """Whether no element is NaN or Inf; allocates nothing of the tensor's size.

    A finite sum has finite terms only. A sum that is not finite may have overflowed, so a second pass decides.
    """
    x = x.detach()
    return math.isfinite(x.sum()) or all(math.isfinite(end) for end in x.aminmax())


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    """The first named tensor with an element that is NaN or Inf; None if there is none."""
    return next(((name, x) for name, x in named if not is_finite(x)), None)


def count_words(x: Tensor) -> str:
    """How many elements are NaN or Inf, for a message: `3 of 4,096 values are NaN or Inf`."""
    return f"{int((~x.isfinite()).sum()):,} of {x.numel():,} values are NaN or Inf"


def refusal(name: str, x: Tensor, folder: Path) -> RunError:
    """The error of a checkpoint that is not written, for a named tensor with an element that is NaN or Inf."""
    return RunError(
        f"the checkpoint {folder} is not written: {count_words(x)} in {name}; start from an earlier checkpoint "
        "with a lower training.lr, or set training.clip_grad"
    )


def require_finite(named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Refuse a checkpoint with an element that is NaN or Inf.

    Raises:
        RunError: names the checkpoint's folder and the first tensor with such an element.
    """
    if first := first_nonfinite(named):
        raise refusal(*first, folder)


def tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors and floats in nested dicts and lists, named by their keys: `optimizer.state.0.exp_avg`."""
    import torch

    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, float):
        yield name, torch.tensor(state)
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from tensors_in(value, f"{name}.{key}" if name else str(key))
