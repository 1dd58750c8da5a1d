"""The border of a router: what enters it, its weight, its logits and the gradients of these; its choice.

A router multiplies these in a precision of its own, float32 for example, to which they are converted without a loss.
Some rows of its logits are compared with the product in float64 (`products`), and so are the experts that it chooses
for these rows, and their weights (`routing`). The gradients that it takes back, of the weights to the logits and of
these to what entered, are compared in the same rows. It gets a view of what enters, whose gradient is its part alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen
from quantexp.proof.hooked import unseen_hook
from quantexp.proof.objective import NOT_KNOWN, Objective
from quantexp.proof.products import num_wrong, reference
from quantexp.proof.routing import (
    Balance,
    balance_of,
    logits_gradient,
    num_other_choices,
    rule_of,
    weights_of,
)

#: Rows of logits that are compared at most.
_ROWS = 64
#: What must have a gradient.
_ENTERED, _LOGITS, _WEIGHTS = "what entered it", "its logits", "its weights"


@dataclass
class _Pass:
    """One forward pass of the router, and the backward pass that follows it."""

    #: What entered, and the weight.
    sources: list[Tensor] = field(default_factory=list)
    #: Some rows of the logits, of the choice, and of the gradients of the weights and the logits.
    logits: Tensor | None = None
    chosen: Tensor | None = None
    d_weights: Tensor | None = None
    d_logits: Tensor | None = None
    #: Of all its tokens, if there is one.
    balance: Balance | None = None
    #: What has no gradient yet.
    due: set[str] = field(default_factory=set)


class RouterBorder:
    """The tensors that a router's products may multiply, while it is watched."""

    def __init__(
        self, module: nn.Module, report: Callable[[str], None], objective: Objective = NOT_KNOWN
    ) -> None:
        """`report` receives what is wrong, in words; `objective` has the scale of the balancing loss."""
        self._module: Any = module
        self._report, self._objective = report, objective
        self._sources: list[Tensor] = []
        self._now = _Pass()
        #: The passes of which gradients are to come.
        self._open: list[_Pass] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the router inside."""
        gating = self._module.gating

        def gate(x: Tensor) -> Tensor:
            now = self._now
            self._sources = now.sources = [x.detach(), self._module.weight.detach()]
            logits: Tensor = gating(x)
            with unseen():
                self._compare(logits.detach())
            if logits.requires_grad:
                logits.register_hook(unseen_hook(partial(self._see_logits, now)))  # type: ignore[no-untyped-call]
            return logits

        self._module.gating = gate
        handles = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave),
        ]
        try:
            yield
            for name in (_WEIGHTS, _LOGITS, _ENTERED):
                if any(name in now.due for now in self._open):
                    self._report(f"the gradient of {name} did not come")
        finally:
            self._module.gating = gating
            for handle in handles:
                handle.remove()
            self._sources, self._now = [], _Pass()
            self._open.clear()

    def _enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        now = self._now = _Pass()
        x: Tensor = args[0]
        if torch.is_grad_enabled() and (self._module.training or x.requires_grad):
            now.due = {_ENTERED, _LOGITS, _WEIGHTS}
            self._open.append(now)
        if not (now.due and x.requires_grad):
            return None
        own = x.view_as(x)
        own.register_hook(unseen_hook(partial(self._see_entered, now)))  # type: ignore[no-untyped-call]
        return own, *args[1:]

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
        self._now.logits = seen.clone()
        if self._now.due and self._module.training:
            self._now.balance = self._balance(logits)

    def _balance(self, logits: Tensor) -> Balance | None:
        """The balancing loss; None if there is none, or its formula is another."""
        config, rule = self._module.config, rule_of(self._module)
        kind, group = (
            config.moe_router_load_balancing_type,
            getattr(self._module, "tp_cp_group", None),
        )
        if rule is None or kind not in ("aux_loss", "seq_aux_loss") or group is None:
            return None

        def add(numbers: Tensor) -> Tensor:
            if group.size() > 1:
                torch.distributed.all_reduce(numbers, group=group)
            return numbers

        balance = balance_of(rule, logits, kind == "seq_aux_loss", group.size(), add)
        self._objective.see_balance(balance.value, balance.slack_of_value)
        return balance

    def _leave(self, _: nn.Module, args: object, output: Any) -> None:
        """Compare the experts that it chooses from these logits, and their weights."""
        now, rule = self._now, rule_of(self._module)
        if now.logits is None:
            return
        with unseen():
            probs, chosen = (_some(each.detach()) for each in output)
            now.chosen = chosen
            if rule is None:
                pass
            elif wrong := num_other_choices(rule, now.logits, chosen):
                self._report(
                    f"{wrong} of {len(chosen)} tokens are not given to the experts of its logits"
                )
            elif wrong := num_wrong(probs, weights_of(rule, now.logits, chosen)):
                self._report(
                    f"{wrong} of {probs.numel()} weights of experts are not those of its logits"
                )
        if output[0].requires_grad:
            output[0].register_hook(unseen_hook(partial(self._see_weights, now)))

    def _see_weights(self, now: _Pass, g: Tensor) -> None:
        self._came(now, _WEIGHTS)
        now.d_weights = _some(g)

    def _see_logits(self, now: _Pass, g: Tensor) -> None:
        """Compare the gradient of the logits with that of the weights and with the balancing loss."""
        self._came(now, _LOGITS)
        self._sources = [*now.sources, g]
        now.d_logits = own = _some(g)
        rule, factor = rule_of(self._module), self._factor(now)
        if rule is None or factor is None or now.d_weights is None:
            return
        assert now.logits is not None
        assert now.chosen is not None
        slopes = slack = torch.zeros_like(now.logits[:1], dtype=torch.float64)
        if now.balance is not None:
            both = now.balance.slopes, now.balance.slack
            slopes, slack = (_some((factor * x).expand(g.shape)) for x in both)
        given = now.logits, now.chosen, now.d_weights
        if wrong := num_wrong(own, logits_gradient(rule, *given, slopes, slack[:, :1])):
            words = "of the gradient of its logits do not follow from that of its weights"
            if factor:
                words += " and the balancing loss"
            self._report(f"{wrong} of {own.numel()} elements {words}")

    def _factor(self, now: _Pass) -> float | None:
        """Of the balancing loss's derivative; 0 without one, None if it is not known."""
        config = self._module.config
        coefficients = config.moe_aux_loss_coeff
        if getattr(config, "moe_z_loss_coeff", None) is not None:
            return None
        if config.moe_router_load_balancing_type == "none" or not coefficients:
            return 0.0
        scale = self._objective.scale_of_balance
        if now.balance is None or scale is None or isinstance(coefficients, list):
            return None
        return float(coefficients * scale)

    def _see_entered(self, now: _Pass, g: Tensor) -> None:
        """Compare the gradient of what entered with the product of that of the logits and the weight."""
        self._came(now, _ENTERED)
        if now.d_logits is not None:
            own = _some(g)
            if wrong := num_wrong(own, reference(now.d_logits, now.sources[1])):
                words = "of the gradient of what entered it are not the product of its logits'"
                self._report(f"{wrong} of {own.numel()} elements {words}")

    def _came(self, now: _Pass, name: str) -> None:
        now.due.discard(name)
        self._open = [each for each in self._open if each.due]

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
