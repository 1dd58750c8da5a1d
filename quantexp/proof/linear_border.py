"""The border of a linear layer: x, w and y, g and dx, and the weight's gradient on its way to the main gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen, without_torch_function
from quantexp.proof.bits import num_unequal
from quantexp.proof.border import CLIPPING, Border, Shares, added, some_rows
from quantexp.proof.call import Call
from quantexp.proof.draws import lines
from quantexp.proof.expected import Images, Plane, is_along_rows, reduces_rows
from quantexp.proof.hooked import unseen_hook
from quantexp.proof.lines import Lines
from quantexp.proof.products import Projection, Reference, num_wrong_rows, reference
from quantexp.proof.turning import turned_back
from quantexp.proof.verdict import product_label
from quantexp.quant.product_context import ProductContext
from quantexp.quant.sites import FPROP_W, Operand, Product, Site, Slot, operands_of


@dataclass(frozen=True)
class Added:
    """Some elements of a weight's main gradient, and what they must be after a gradient is added."""

    call: Call
    rows: Tensor
    columns: Tensor
    after: Tensor


class LinearBorder(Border):
    """The border of a linear layer."""

    def __init__(
        self, *args: Any, weight: Tensor, shares: Shares, keeps_gradients: bool = False
    ) -> None:
        """`keeps_gradients`: nothing but this rank's micro-batches is added to the weight's main gradient."""
        super().__init__(*args)
        self.weight, self.shares, self.keeps_gradients = weight, shares, keeps_gradients
        self._added: Added | None = None
        self._is_first, self._is_tied = True, False

    def _install(self) -> None:
        module = self.module
        # Before the module's own hooks where they gather columns.
        is_first = self.shares.size > 1
        self._stand(self._enter, self._leave, prepend=is_first)
        if self.looks_at((Site.LINEAR, Product.WGRAD)):
            with without_torch_function():
                if self.weight.requires_grad and getattr(module, "weight", None) is self.weight:
                    self._hook(self.weight.register_hook(unseen_hook(self._weight_gradient)))

    def finish(self) -> None:
        """See `Hooked`."""
        if self._added is not None and self.keeps_gradients:
            with unseen():
                self._check_added()

    def _forget(self) -> None:
        super()._forget()
        self._added, self._is_first = None, True

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *others = args
        call = self._begin()
        call.rows = getattr(module, "rows", None)
        shares, needed, differentiates = self.shares, self.needed(call), torch.is_grad_enabled()
        gathers = shares.divides_tokens and shares.sums_dx
        with unseen():
            if Operand.X in needed:
                own = shares.gather(x.detach()) if gathers else x.detach()
                self._see(call, Operand.X, own, differentiates)
            if Operand.W in needed:
                self._see(call, Operand.W, self.weight.detach(), differentiates)
        is_due = differentiates and x.requires_grad
        if is_due and self.looks_at((Site.LINEAR, Product.DGRAD), call):
            x = x.view_as(x)
            self.due.add((Site.LINEAR, Product.DGRAD))
            self._on_gradient(x, lambda dx: self._input_gradient(call, dx))
        weight = kwargs.get("weight")
        self._is_tied = weight is not None
        looks = differentiates and self.looks_at((Site.LINEAR, Product.WGRAD))
        if weight is not None and weight.requires_grad and looks:
            weight = weight.view_as(weight)
            kwargs = kwargs | {"weight": weight}
            self._on_gradient(weight, self._weight_gradient)
        return (x, *others), kwargs

    def _leave(self, module: nn.Module, args: object, output: tuple[Tensor, Any]) -> None:
        call = self.call
        assert call is not None
        y = output[0]
        self.due.add((Site.LINEAR, Product.FPROP))
        if y.requires_grad and self.weight.requires_grad:
            self.due.add((Site.LINEAR, Product.WGRAD))
        if y.numel() and self.looks_at((Site.LINEAR, Product.FPROP), call):
            with unseen():
                self._output(call, y.detach())
        if any(self.looks_at((Site.LINEAR, each)) for each in (Product.DGRAD, Product.WGRAD)):
            self._on_gradient(y, lambda g: self._output_gradient(call, g))

    def _see(self, call: Call, operand: Operand, x: Tensor, differentiates: bool = True) -> None:
        """Take a source; a drawn check takes the lines that it looks at here, before the module has them."""
        takes_lines = self._units is not None and call.rows is None and bool(x.numel())
        call.see(operand, x, is_taken=takes_lines)
        for slot in self.declared.slots if takes_lines else ():
            comes = slot.product is Product.FPROP or differentiates
            if slot.operand is operand and comes and self.looks_at((slot.site, slot.product), call):
                call.lines[slot] = self._expected_lines(call, slot)

    def _output(self, call: Call, y: Tensor) -> None:
        shares = self.shares
        y = _matrix(self._own_columns(y))
        bias = getattr(self.module, "bias", None)
        adds = bias is not None and not getattr(self.module, "skip_bias_add", True)
        self._product(
            call,
            Product.FPROP,
            y,
            sums=shares.sums_y,
            after=bias.detach() if adds and bias is not None else None,
        )

    def _own_columns(self, y: Tensor) -> Tensor:
        """The rank's columns of an output that may be gathered from all ranks."""
        is_gathered = y.shape[-1] > self.weight.shape[0]
        return y.chunk(self.shares.size, dim=-1)[self.shares.rank] if is_gathered else y

    def _output_gradient(self, call: Call, g: Tensor) -> None:
        shares = self.shares
        if Operand.G in self.needed(call):
            g = self._own_columns(g)
            gathers = shares.divides_tokens and shares.sums_y
            self._see(call, Operand.G, shares.gather(g) if gathers else g)
        call.is_recomputed = False
        self.call = call

    def _input_gradient(self, call: Call, dx: Tensor) -> None:
        if dx.numel() and Operand.G in call.sources:
            self._product(call, Product.DGRAD, _matrix(dx), sums=self.shares.sums_dx)

    def _weight_gradient(self, dw: Tensor) -> None:
        call = self.call
        self._check_added()
        if call is not None and Operand.G in call.sources and call.sources[Operand.G].numel():
            self._product(call, Product.WGRAD, dw)
            if self.looks_at((Site.LINEAR, Product.WGRAD), call):
                self._note_added(call, dw)

    def _note_added(self, call: Call, dw: Tensor) -> None:
        """Note some elements of the main gradient, to which a gradient is about to be added."""
        main = getattr(self.weight, "main_grad", None)
        if main is None or self._is_tied:
            return  # the embedding adds its part to a tied weight's gradient
        chosen = call.moment.choice(call.module, "main gradient")
        rows, columns = (
            lines(chosen, extent, 1, number)
            for extent, number in zip(dw.shape, (self.extent.left, self.extent.right), strict=True)
        )
        before = main[rows][:, columns]
        if call.moment.index == 0 and self._is_first:
            wrong = int(before.count_nonzero())
            words = "of the main gradient are not zero before the first is added"
            self._other(call, wrong, before.numel(), words)
        self._is_first = False
        self._added = Added(call, rows, columns, before + dw[rows][:, columns].to(before.dtype))

    def _check_added(self) -> None:
        """Compare the main gradient with what a gradient must have made of it."""
        added, self._added = self._added, None
        if added is not None:
            main: Tensor = self.weight.main_grad  # type: ignore[attr-defined]
            now = main[added.rows][:, added.columns]
            words = "of the main gradient are not those before and the gradient that was added"
            self._other(added.call, num_unequal(now, added.after), now.numel(), words)

    def _other(self, call: Call, wrong: int, of: int, words: str) -> None:
        label = product_label(call.module, Site.LINEAR, Product.WGRAD)
        self.findings.other(call, label, f"{wrong} of {of} elements {words}" if wrong else "")

    def _product(
        self,
        call: Call,
        product: Product,
        out: Tensor,
        *,
        sums: bool = False,
        after: Tensor | None = None,
    ) -> None:
        """Compare some elements of a product with those of the expected operands."""
        if not self.looks_at((Site.LINEAR, product), call):
            return
        if (source := self._one_source(call, product)) is not None:
            assert call.rows is not None
            out = out[call.rows.of_source(source)]
            call = call.of_source(source)
        slots = operands_of(Site.LINEAR, product)
        (left, of_left), (right, of_right) = (
            call.lines.pop(slot) if slot in call.lines else self._expected_lines(call, slot)
            for slot in slots
        )
        clipped, copy, shares = self._clipped(call, product), call.spec(slots[1]).copy, self.shares
        is_zero = None if clipped is None else clipped[left][:, right]
        slopes = Images(call).derivative(FPROP_W) if product is Product.WGRAD else None
        factors = None if slopes is None else slopes[left][:, right]
        is_turned = copy is not None and copy.is_transformed
        bias = None if after is None else after[right].double()
        rows, own = left, None
        if sums and shares.divides_tokens:
            first = shares.rank * len(out)
            own = (left >= first) & (left < first + len(out))
            rows = left[own] - first

        def expected() -> Reference:
            result = reference(of_left(), of_right().t(), self._scale(Site.LINEAR, product))
            result = result.times(factors).zero_where(is_zero)
            if copy is not None and is_turned:
                result = turned_back(result, right, copy, out.dtype)
            if sums:
                result = added(result, shares.add, shares.size)
            if own is not None:
                result = some_rows(result, own)
            if bias is not None:
                values, rounded = result.values + bias, result.rounded + bias.abs()
                result = replace(result.again(), values=values, rounded=rounded)
            return result

        self._require_unchanged(call, Site.LINEAR, product)
        self.findings.product(call, Site.LINEAR, product, out[rows[:, None], right], expected)
        projection = call.projections.pop(product, None)
        if (
            isinstance(projection, Projection)
            and not (sums or is_turned)
            and after is None
            and clipped is None
            and factors is None
        ):
            wrong = num_wrong_rows(out, projection)
            self.findings.rows(call, Site.LINEAR, product, wrong, len(out))

    @staticmethod
    def _clipped(call: Call, product: Product) -> Tensor | None:
        """Where dx, or the weight's gradient, is zero because the forward operand saturated."""
        slot = CLIPPING.get(product)
        clipped = None if slot is None else Images(call).clipped(slot)
        return None if clipped is None else _matrix(clipped)

    def _one_source(self, call: Call, product: Product) -> int | None:
        """The source whose rows are looked at, where each has another copy of an expert's weight; None means all."""
        rows = call.rows
        if rows is None or rows.num_sources == 1 or product is Product.WGRAD:
            return None
        chain = call.spec(Slot(Site.LINEAR, product, Operand.W)).chain
        if not any(spec.draws or spec.is_transformed for spec in chain):
            return None
        held = [source for source in range(rows.num_sources) if len(rows.of_source(source))]
        return call.moment.choice(call.module, product, "source").choice(held)

    def _expected_lines(self, call: Call, slot: Slot) -> tuple[Tensor, Lines]:
        """The drawn lines of an operand, and what they must be, [lines, K]."""
        plane = _plane(call, slot)
        picked = self._picked(call, slot, plane.x.shape[1 if reduces_rows(slot) else 0])
        return picked, Images(call).lines(slot, plane, picked)

    def drawn_operands(
        self, context: ProductContext, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Slot, Tensor, Lines]]:
        """See `Border`."""
        call, product = self.call, context.product
        if call is None or context.source is not None:
            return
        slots = operands_of(Site.LINEAR, product)
        for slot, x in zip(slots, (_matrix(left), right.t()), strict=True):
            if slot.operand in call.sources:
                picked, expected = call.lines.get(slot) or self._expected_lines(call, slot)
                yield slot, x[picked], expected


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _plane(call: Call, slot: Slot) -> Plane:
    """The plane of a linear layer's operand."""
    images = Images(call)
    if images.is_summed(slot):
        return Plane(images.multiplied(slot), is_expected=True)
    if images.is_made_whole(slot):
        return Plane(_matrix(images.whole(slot)), is_expected=True)
    x, spec = call.source(slot), call.spec(slot)
    is_by_sequence = x.dim() == 3 and spec.quantised and is_along_rows(slot, spec)
    return Plane(_matrix(x), sequences=x.shape[1] if is_by_sequence else 1)
