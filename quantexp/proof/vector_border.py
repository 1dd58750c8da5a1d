"""The gradients of parameters that are vectors, recomputed in float64 in some of their elements.

    gain of a norm, n = x / rms(x)      dgain_d = sum_t dy_td n_td
    bias of a linear layer              db_d = sum_t dy_td

x is what entered the module, dy the gradient of what left it. An implementation may round n and each product to the
dtype, adds in float32, and rounds the sum. Roundings of different rows are independent: their sum exceeds LAMBDA times
its root mean square with a probability below 3e-14 (Hoeffding's inequality), and never that of their magnitudes. Rows
that are equal, as those of one token in the first layer, may have equal roundings; m is how many of them there are.

The gradient must then be added to the main gradient, which is zero before the first.

    # R rows: tokens, or tokens and heads; C drawn columns
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen, without_torch_function
from quantexp.proof.between import LARGEST_SQUARES
from quantexp.proof.draws import Moment, lines
from quantexp.proof.hooked import Hooked, plain, unseen_hook
from quantexp.proof.layer_pass import NORMS, Claim, Claims
from quantexp.proof.products import LAMBDA, Reference, largest_finite, unit

#: Elements of a parameter.
Index: TypeAlias = Tensor | tuple[Tensor, Tensor]
#: Elements of a vector that are compared.
_COLUMNS = 32
#: The smallest normal number of float32 and bfloat16.
_TINY = 2.0**-126


class GradientBorder(Hooked):
    """The gradient of a parameter while it is watched: what a pass computes, and what becomes of it.

    Args:
        name: of the layer, in messages.
        label: of the parameter, in messages.
        parameter: the one.
        moment: when the running pass is.
        claims: for what is seen.
        keeps_gradients: nothing but this rank's micro-batches is added to the main gradient.
    """

    def __init__(
        self,
        name: str,
        label: str,
        parameter: nn.Parameter,
        moment: Callable[[], Moment],
        claims: Claims,
        keeps_gradients: bool,
    ) -> None:
        super().__init__()
        self._name, self._label, self._moment, self._claims = name, label, moment, claims
        self._parameter: Any = parameter
        self._keeps_gradients = keeps_gradients
        self._forget()

    def _install(self) -> None:
        if self._parameter.requires_grad:
            self._watch()
            with without_torch_function():
                self._hook(self._parameter.register_hook(unseen_hook(self._arrive)))

    @abstractmethod
    def _watch(self) -> None:
        """Let each pass call `_expect`."""

    def finish(self) -> None:
        """See `Hooked`."""
        self._require_come()
        if self._keeps_gradients:
            with unseen():
                self._check_added()

    def _forget(self) -> None:
        #: What the next gradient must be, in which elements, and when its pass was.
        self._due: tuple[Reference, Index, Moment] | None = None
        #: What the main gradient must be after the last one.
        self._added: tuple[Tensor, Index, Moment] | None = None
        self._is_first = True
        with unseen():
            self._claims.settle()

    def _expect(self, expected: Reference, at: Index, moment: Moment) -> None:
        """The gradient that comes next must be this in some elements, added to what its pass has given already."""
        if self._due is not None and self._due[2] == moment:
            expected = _sum(self._due[0], expected)
        else:
            self._require_come()
        self._due = expected, at, moment

    def _arrive(self, gradient: Tensor) -> None:
        due, self._due = self._due, None
        self._check_added()
        if due is None:
            return
        expected, at, moment = due
        own = gradient[at]
        self._tell(own, expected, "are not those of its module's passes", moment)
        main = getattr(self._parameter, "main_grad", None)
        if main is None:
            return
        before = main[at]
        if self._is_first and moment.index == 0:
            self._tell(before, torch.zeros_like(before), "are not zero before the first", moment)
        self._is_first = False
        self._added = before + own.to(before.dtype), at, moment

    def _learns_by(self, y: Tensor) -> bool:
        """Whether a gradient comes from what left the module, as it must in training."""
        if y.grad_fn is None and torch.is_grad_enabled():
            self._tell_missing(self._moment())
        return y.grad_fn is not None

    @staticmethod
    def _on_gradient(y: Tensor, see: Callable[[Tensor], None]) -> None:
        assert y.grad_fn is not None
        hook, place = unseen_hook(see), y.output_nr
        y.grad_fn.register_prehook(lambda g: None if g[place] is None else hook(g[place]))

    def _require_come(self) -> None:
        """Report a gradient that a pass should have had."""
        due, self._due = self._due, None
        if due is not None:
            self._tell_missing(due[2])

    def _tell_missing(self, moment: Moment) -> None:
        words = f"the gradient of {self._label} did not come"
        self._claims.tell(self._name, words, moment.micro_batch)

    def _check_added(self) -> None:
        """Compare the main gradient with what a gradient must have made of it."""
        added, self._added = self._added, None
        if added is not None:
            now = self._parameter.main_grad[added[1]]
            self._tell(now, added[0], "are not added to the main gradient", added[2])

    def _tell(self, own: Tensor, expected: Reference | Tensor, words: str, moment: Moment) -> None:
        words = f"of the gradient of {self._label} {words}"
        self._claims.add(Claim(own, expected, self._name, words, moment.micro_batch))


def _sum(one: Reference, other: Reference) -> Reference:
    """What both give together, each of them and their sum rounded. One that overflows decides the sign of infinity."""
    both = one.plus(other)
    rounded = both.rounded + both.values.abs()
    return replace(both, rounded=rounded, sums=both.summed, roundings=max(2, both.roundings))


class VectorBorder(GradientBorder):
    """One vector of a module while it is watched."""

    def __init__(
        self, name: str, label: str, module: nn.Module, vector: nn.Parameter, *common: Any
    ) -> None:
        """`module` is a norm, or a linear layer with a bias; the rest as in `GradientBorder`."""
        super().__init__(name, label, vector, *common)
        self._module: Any = module
        self._is_norm = isinstance(module, nn.RMSNorm)

    def _watch(self) -> None:
        self._hook(self._module.register_forward_hook(plain(self._leave)))
        chosen = self._moment().choice(self._name, self._label)
        self._picked = lines(chosen, len(self._parameter), 1, _COLUMNS).to(self._parameter.device)

    def _leave(self, _: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        y: Tensor = output[0] if isinstance(output, tuple) else output
        if not self._learns_by(y):
            return
        moment = self._moment()
        with unseen():
            factors, repeats = self._factors(args[0].detach()) if self._is_norm else (None, 1)

        def see(g: Tensor) -> None:
            self._expect(self._expected(g, factors, repeats), self._picked, moment)

        self._on_gradient(y, see)

    def _factors(self, x: Tensor) -> tuple[Tensor, int]:
        """The drawn columns of n, [R, C], float64, and how many rows have equal roundings at most."""
        rows = x.reshape(-1, x.shape[-1])
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()
        inverse = torch.rsqrt(squares / rows.shape[1] + self._module.eps)
        inverse.masked_fill_(squares >= LARGEST_SQUARES, math.nan)  # which float32 does not hold
        if not len(rows):
            return rows.double()[:, self._picked], 1
        counts = torch.unique(squares, return_counts=True)[1]
        return rows[:, self._picked].double() * inverse[:, None], int(counts.max())

    def _expected(self, g: Tensor, factors: Tensor | None, repeats: int) -> Reference:
        own = g.reshape(-1, g.shape[-1])[:, self._picked].double()
        terms = own if factors is None else own * factors
        values, magnitude = terms.sum(0), terms.abs().sum(0)
        squares = terms.square().sum(0)
        roundings = 0.0 if factors is None else 2.0
        by_chance = LAMBDA * (repeats * squares).sqrt()
        rounded = values.abs() + roundings * torch.minimum(magnitude, by_chance)
        lost = max(_TINY, torch.finfo(g.dtype).smallest_normal * unit(g.dtype))
        lost *= (1 + roundings) * len(terms) * (1 + largest_finite(own))
        summed = math.sqrt(max(1, len(terms))) * magnitude
        return Reference(values, rounded, summed, lost, largest=magnitude)


def vector_borders(
    name: str,
    module: nn.Module,
    moment: Callable[[], Moment],
    claims: Claims,
    keeps_gradients: bool,
) -> Iterator[VectorBorder]:
    """Those of the norms in a module, and of its linear layers that add a bias themselves; arguments as above.

    Transformer Engine's layers have none.
    """
    for path, each in module.named_modules():
        own = path.rpartition(".")[2]
        bias = getattr(each, "bias", None)
        adds = not getattr(each, "skip_bias_add", True) and not hasattr(each, "fp8_meta")
        common = moment, claims, keeps_gradients
        if isinstance(each, nn.RMSNorm):
            gain = f"{NORMS.get(own, 'the last norm')}'s gain"
            yield VectorBorder(name, gain, each, each.weight, *common)
        elif isinstance(bias, nn.Parameter) and adds and own.startswith("linear_"):
            yield VectorBorder(name, f"{own}'s bias", each, bias, *common)
