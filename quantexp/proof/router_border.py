"""The border of a router: what enters it, its weight, its logits and the gradients of these; its choice.

A router multiplies these in a precision of its own, float32 for example, to which they are converted without a loss.
Some rows of its logits are compared with the product in float64 (`products`), and so are the experts that it chooses
for these rows, and their weights (`routing`).
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
from quantexp.proof.routing import num_other_choices, rule_of, weights_of

#: Rows of logits that are compared at most.
_ROWS = 64


class RouterBorder:
    """The tensors that a router's products may multiply, while it is watched."""

    def __init__(self, module: nn.Module, report: Callable[[str], None]) -> None:
        """`report` receives what is wrong, in words."""
        self._module: Any = module
        self._report = report
        self._sources: list[Tensor] = []
        self._logits: Tensor | None = None

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
        handle = self._module.register_forward_hook(self._chosen)
        try:
            yield
        finally:
            self._module.gating = gating
            handle.remove()
            self._sources, self._logits = [], None

    def _compare(self, logits: Tensor) -> None:
        """Compare some rows of the logits with the product of what entered the router."""
        x, weight = (each.reshape(-1, each.shape[-1]) for each in self._sources)
        seen = _some(logits)
        expected = reference(_some(x), weight.t())
        bias = getattr(self._module, "bias", None)
        if bias is not None:
            values, rounded = (
                expected.values + bias.detach(),
                expected.rounded + bias.detach().abs(),
            )
            expected = replace(expected.again(), values=values, rounded=rounded)
        if wrong := num_wrong(seen, expected):
            words = "logits are not the product of what entered it and its weight"
            self._report(f"{wrong} of {seen.numel()} {words}")
        self._logits = seen.clone()

    def _chosen(self, _: nn.Module, args: object, output: Any) -> None:
        """Compare the experts that it chooses from these logits, and their weights."""
        logits, self._logits = self._logits, None
        rule = rule_of(self._module)
        if logits is None or rule is None:
            return
        with unseen():
            probs, chosen = (_some(each.detach()) for each in output)
            if wrong := num_other_choices(rule, logits, chosen):
                self._report(
                    f"{wrong} of {len(chosen)} tokens are not given to the experts of its logits"
                )
            elif wrong := num_wrong(probs, weights_of(rule, logits, chosen)):
                self._report(
                    f"{wrong} of {probs.numel()} weights of experts are not those of its logits"
                )

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


def _some(x: Tensor) -> Tensor:
    """Some of the rows of a tensor, the same of each with as many rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[:: max(1, -(-len(rows) // _ROWS))]
