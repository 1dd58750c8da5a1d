"""The border of a router: what enters it, its weight, its logits and the gradients of these.

A router multiplies these in a precision of its own, float32 for example, to which they are converted without a loss.
Some rows of its logits are compared with the product in float64 (`products`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen
from quantexp.proof.products import num_wrong, reference

#: Rows of logits that are compared at most.
_ROWS = 64


class RouterBorder:
    """The tensors that a router's products may multiply, while it is watched."""

    def __init__(self, module: nn.Module, report: Callable[[int, int], None]) -> None:
        """`report` receives the numbers of wrong and of compared logits."""
        self._module: Any = module
        self._report = report
        self._sources: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the router inside."""
        gating = self._module.gating

        def gate(x: Tensor) -> Tensor:
            self._sources = [x.detach(), self._module.weight.detach()]
            logits: Tensor = gating(x)
            with unseen():
                self._compare(logits.detach())
            if logits.requires_grad:
                sources = self._sources
                logits.register_hook(lambda g: self._begin_backward(sources, g))  # type: ignore[no-untyped-call]
            return logits

        self._module.gating = gate
        try:
            yield
        finally:
            self._module.gating = gating
            self._sources = []

    def _compare(self, logits: Tensor) -> None:
        """Compare some rows of the logits with the product of what entered the router."""
        x, weight = (each.reshape(-1, each.shape[-1]) for each in self._sources)
        seen = logits.reshape(-1, logits.shape[-1])
        rows = slice(None, None, max(1, -(-len(x) // _ROWS)))
        expected = reference(x[rows], weight.t())
        bias = getattr(self._module, "bias", None)
        if bias is not None:
            values, rounded = (
                expected.values + bias.detach(),
                expected.rounded + bias.detach().abs(),
            )
            expected = replace(expected.again(), values=values, rounded=rounded)
        self._report(num_wrong(seen[rows], expected), seen[rows].numel())

    def _begin_backward(self, sources: list[Tensor], g: Tensor) -> None:
        self._sources = [*sources, g.detach()]

    def has(self, x: Tensor) -> bool:
        """Whether a matrix is one of the tensors, or its transpose, in another precision."""
        for source in self._sources:
            matrix = source.reshape(-1, source.shape[-1])
            for each in (matrix, matrix.t()):
                if each.shape == x.shape and torch.allclose(
                    each.to(x.dtype), x, rtol=0.0, atol=0.0, equal_nan=True
                ):
                    return True
        return False
