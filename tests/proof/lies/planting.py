"""The places at which a fault replaces code of quantexp, none of them part of the proof.

    quantisers   `quantise` and its two relatives as the products call them: every quantised operand
    operands     an operand between its quantiser and its product, by module, slot and moment
    products     the result of a product, from operands of one's own
    maps         what a module believes to be declared
    borders      what a linear layer or attention returns, forward or backward

Functions are replaced in every module of `quantexp.quant` and `quantexp.training` that has them, so a fault survives a
move of the code. A name that no module has is an error: a fault that is not planted must not count as caught.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantexp.formats import QuantSpec, Rounding, Scaling, finite_amax, hadamard, quantise
from quantexp.formats.torch_internals import in_backward
from quantexp.quant.precision import ModuleId, ModulePrecision, PrecisionMap
from quantexp.quant.product_context import is_watched
from quantexp.quant.sites import Operand as Name
from quantexp.quant.sites import Product, Slot, dim_of
from quantexp.quant.step_state import current_state
from quantexp.quant.whole_amax import transformed

if TYPE_CHECKING:
    from .faults import Fault

_PACKAGES = ("quantexp.quant", "quantexp.training")


@dataclass
class Place:
    """Where the run is."""

    iteration: int = 1
    #: "train", "validation", or "other": an evaluation or a comparison of gradients.
    phase: str = "other"
    #: Over all ranks.
    micro_batch: int = 0
    rank: int = 0


@dataclass(frozen=True)
class When:
    """The moments at which a fault acts; None and the defaults are always."""

    since: int = 1
    until: int = 1 << 30
    #: Iterations are counted modulo this.
    every: int = 1
    phase: str | None = None
    micro_batch: int | None = None
    rank: int | None = None
    #: Only in forward passes that are repeated for the backward one, or only in others.
    recomputed: bool | None = None
    watched: bool | None = None

    def holds(self, place: Place) -> bool:
        """Whether the fault acts now."""
        if not self.since <= place.iteration <= self.until:
            return False
        if (place.iteration - self.since) % self.every:
            return False
        checks = (
            (self.phase, place.phase),
            (self.micro_batch, place.micro_batch),
            (self.rank, place.rank),
            (self.recomputed, in_backward()),
            (self.watched, is_watched()),
        )
        return all(wanted is None or wanted == value for wanted, value in checks)


@dataclass(frozen=True)
class Where:
    """The slots at which a fault acts: shell patterns of a module and of a slot."""

    modules: str = "*"
    slots: str = "*"
    layer: int | None = None

    def holds(self, module: ModuleId, slot: Slot) -> bool:
        """Whether the fault acts there."""
        return (
            (self.layer is None or module.layer == self.layer)
            and fnmatchcase(module.name, self.modules)
            and any(fnmatchcase(str(slot), pattern) for pattern in self.slots.split())
        )


EVERYWHERE, ALWAYS = Where(), When()


@dataclass(frozen=True)
class Quantising:
    """A call of the quantiser."""

    x: Tensor
    spec: QuantSpec
    axis: int
    amax: Tensor | None
    draw: dict[str, Any]
    #: What the quantiser returns.
    honest: Tensor
    planter: Planter

    def again(
        self,
        x: Tensor | None = None,
        spec: QuantSpec | None = None,
        axis: int | None = None,
        amax: Tensor | None = None,
        **draw: Any,
    ) -> Tensor:
        """The image of another tensor, or under another declaration."""
        spec = self.spec if spec is None else spec
        x = self.x if x is None else x
        amax = self.amax if amax is None else amax
        if spec.scaling is Scaling.DELAYED and amax is None:
            amax = finite_amax(x)
        numbers: dict[str, Any] = {}
        if spec.draws:
            numbers = {"seed": 1, "offset": 0} | self.draw | draw
        return quantise(
            x.contiguous(),
            spec,
            axis=self.axis if axis is None else axis,
            amax=amax if spec.is_scaled else None,
            **numbers,
        )

    def blocks(self, x: Tensor) -> Tensor:
        """x as [.., blocks, elements of a block], padded with zeros; `unblocked` is the inverse."""
        moved = x.movedim(self.axis, -1)
        block = min(self.spec.block, moved.shape[-1]) if self.spec.block > 1 else moved.shape[-1]
        padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % block))
        return padded.unflatten(-1, (-1, block))

    def unblocked(self, blocks: Tensor) -> Tensor:
        """The inverse of `blocks`, in x's shape and dtype."""
        moved = blocks.flatten(-2)[..., : self.x.shape[self.axis]]
        return moved.movedim(-1, self.axis).to(self.x.dtype)


@dataclass(frozen=True)
class Operand:
    """An operand on its way to its product, in the layout of its source."""

    module: ModuleId
    slot: Slot
    spec: QuantSpec
    #: Before quantisation.
    x: Tensor
    copy: Tensor
    planter: Planter

    @property
    def axis(self) -> int:
        """The dimension that its blocks run along."""
        return dim_of(self.slot.operand, self.spec)

    def image(self, x: Tensor, spec: QuantSpec | None = None, axis: int | None = None) -> Tensor:
        """x quantised as this operand, or by another declaration."""
        spec = self.spec if spec is None else spec
        axis = self.axis if axis is None else axis
        if not spec.quantised or x.numel() == 0:
            return x
        state = current_state()
        v = transformed(x, spec, axis)
        amax = None
        if spec.scaling is Scaling.DELAYED:
            amax = state.amax(spec)
            amax = finite_amax(v) if amax is None else amax
        image = quantise(v.contiguous(), spec, axis=axis, amax=amax, **state.draw(spec))
        return image.to(x.dtype)

    def last(self, *, by: object = None) -> Tensor | None:
        """The copy at the previous call with this module, slot and key, of this shape; remembers this one."""
        key = ("operand", self.module, self.slot, by)
        before = self.planter.memory.get(key)
        self.planter.memory[key] = self.copy.detach().clone()
        fits = before is not None and before.shape == self.copy.shape
        return before if fits else None


@dataclass(frozen=True)
class Multiplication:
    """A product with its honest result."""

    module: ModuleId
    product: Product
    slots: tuple[Slot, Slot]
    #: The operands before quantisation; quantised where they are declared to be in the working precision.
    a: Tensor
    b: Tensor
    #: As they were multiplied.
    honest_a: Tensor
    honest_b: Tensor
    y: Tensor
    scale: float
    planter: Planter


@dataclass
class Planter(contextlib.AbstractContextManager["Planter"]):
    """Plants one fault; inside, the code of this process has it."""

    fault: Fault
    #: How often the fault acted.
    fired: int = 0
    place: Place = field(default_factory=Place)
    #: What a fault keeps between calls.
    memory: dict[Any, Any] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _is_inside: bool = False

    def __enter__(self) -> Planter:
        _import_all()
        self._stack.__enter__()
        try:
            self._follow()
            self.fault.plant(self)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        self.memory.clear()

    def fire(self) -> None:
        """Count an act of the fault."""
        self.fired += 1

    # Replacing code

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Hold a context while the fault is planted."""
        self._stack.enter_context(context)

    def undo(self, work: Callable[[], None]) -> None:
        """Call a function when the fault is removed."""
        self._stack.callback(work)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class, which may have inherited it."""
        if name in owner.__dict__:
            self._stack.callback(setattr, owner, name, owner.__dict__[name])
        else:
            self._stack.callback(delattr, owner, name)
        setattr(owner, name, value)

    def function(
        self,
        name: str,
        make: Callable[[Any], Any],
        without: Sequence[str] = (),
        *,
        may_miss: bool = False,
    ) -> None:
        """Replace a function wherever quantexp's products and training have it; `make` takes the original.

        Raises:
            LookupError: nothing has it, unless it `may_miss`: then the fault has no place.
        """
        found = [
            (module, vars(module)[name])
            for path, module in sorted(sys.modules.items())
            if path.startswith(_PACKAGES) and name in vars(module) and path not in without
        ]
        if not found and not may_miss:
            raise LookupError(f"no module has a function {name}: the fault is not planted")
        for original in {id(value): value for _, value in found}.values():
            new = make(original)
            for module, value in found:
                if value is original:
                    self.attribute(module, name, new)

    def method(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method, also an inherited one; `make` takes the original, a function of self."""
        before = inspect.getattr_static(owner, name)
        if isinstance(before, staticmethod):
            self.attribute(owner, name, staticmethod(make(before.__func__)))
        else:
            self.attribute(owner, name, make(before))

    def _follow(self) -> None:
        """Keep `place` up to date."""
        from quantexp.quant.step_state import StepState
        from quantexp.training.megatron.step import Stepper

        place = self.place
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            place.rank = torch.distributed.get_rank()

        def in_phase(phase: str) -> Callable[[Any], Any]:
            def make(original: Any) -> Any:
                def run(stepper: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
                    place.phase = phase
                    if phase == "train":
                        place.iteration = first
                    try:
                        return original(stepper, first, *args, **kwargs)
                    finally:
                        place.phase = "other"

                return run

            return make

        def begin(original: Any) -> Any:
            def begun(state: Any, iteration: int, micro_batch: int) -> None:
                place.iteration, place.micro_batch = iteration, micro_batch
                place.rank = torch.distributed.get_rank()
                original(state, iteration, micro_batch)

            return begun

        self.method(Stepper, "step", in_phase("train"))
        self.method(Stepper, "validation_loss", in_phase("validation"))
        self.method(StepState, "begin", begin)

    # The quantiser

    def quantisers(
        self,
        change: Callable[[Quantising], Tensor | None],
        when: When = ALWAYS,
        spec: Callable[[QuantSpec], bool] = lambda spec: True,
    ) -> None:
        """Replace what the quantiser returns; None leaves it."""

        def changed(call: Quantising) -> Tensor:
            if not when.holds(self.place) or not spec(call.spec) or call.x.numel() == 0:
                return call.honest
            result = change(call)
            if result is None:
                return call.honest
            self.fire()
            return result

        def one(original: Any) -> Any:
            def quantised(
                x: Tensor,
                fmt: QuantSpec,
                *,
                axis: int = -1,
                amax: Tensor | None = None,
                out: Tensor | None = None,
                **draw: Any,
            ) -> Tensor:
                source = x.clone()
                honest = original(x, fmt, axis=axis, amax=amax, out=out, **draw)
                return changed(Quantising(source, fmt, axis, amax, draw, honest, self))

            return quantised

        def after_transform(original: Any) -> Any:
            def quantised(
                x: Tensor,
                fmt: QuantSpec,
                transform: Any,
                *,
                axis: int = -1,
                amax: Tensor | None = None,
                out: Tensor | None = None,
                **draw: Any,
            ) -> Tensor:
                source = hadamard(x, axis=axis, **vars(transform))
                honest = original(x, fmt, transform, axis=axis, amax=amax, out=out, **draw)
                return changed(Quantising(source, fmt, axis, amax, draw, honest, self)).to(x.dtype)

            return quantised

        def two(original: Any) -> Any:
            def quantised(
                x: Tensor,
                fmt: QuantSpec,
                *,
                axes: tuple[int, int],
                out: Any = None,
                amax: Tensor | None = None,
            ) -> tuple[Tensor, Tensor]:
                source = x.clone()
                both = original(x, fmt, axes=axes, out=out, amax=amax)
                left, right = (
                    changed(Quantising(source, fmt, axis, amax, {}, honest, self))
                    for axis, honest in zip(axes, both, strict=True)
                )
                return left, right

            return quantised

        self.function("quantise", one)
        self.function("quantise_both", two)
        self.function("quantise_transformed", after_transform)

    # Operands

    def operands(
        self,
        change: Callable[[Operand], Tensor | None],
        where: Where = EVERYWHERE,
        when: When = ALWAYS,
    ) -> None:
        """Replace operands between their quantiser and their product; None leaves one."""
        from quantexp.quant.attention.tile_products import TileProducts

        def changed(precision: ModulePrecision, slot: Slot, x: Tensor, copy: Tensor) -> Tensor:
            if not where.holds(precision.module, slot) or not when.holds(self.place):
                return copy
            if x.numel() == 0:
                return copy
            spec = precision.spec(slot)
            result = change(Operand(precision.module, slot, spec, x.detach(), copy, self))
            if result is None:
                return copy
            self.fire()
            return result.to(copy.dtype)

        def whole(original: Any) -> Any:
            def quantised_operand(
                precision: ModulePrecision, slot: Slot, x: Tensor, *more: Any, **named: Any
            ) -> Tensor:
                copy = original(precision, slot, x, *more, **named)
                return changed(precision, slot, x, copy)

            return quantised_operand

        def tile(original: Any) -> Any:
            def quantised_tile(work: Any, slot: Slot, tile: Any, x: Tensor) -> Tensor:
                copy = original(work, slot, tile, x)
                return copy if self._is_inside else changed(work.precision, slot, x, copy)

            return quantised_tile

        def tiles(original: Any) -> Any:
            def quantised_tile_pair(
                work: Any, first: Slot, second: Slot, tile: Any, x: Tensor
            ) -> tuple[Tensor, Tensor]:
                self._is_inside = True
                try:
                    copies = original(work, first, second, tile, x)
                finally:
                    self._is_inside = False
                left, right = (
                    changed(work.precision, slot, x, copy)
                    for slot, copy in zip((first, second), copies, strict=True)
                )
                return left, right

            return quantised_tile_pair

        # `sources` passes its copies on to a product that asks again.
        self.function("quantised_operand", whole, without=("quantexp.quant.sources",))
        self.method(TileProducts, "quantised_tile", tile)
        self.method(TileProducts, "quantised_tile_pair", tiles)

    # Products

    def products(
        self,
        change: Callable[[Multiplication], Tensor | None],
        where: Where = EVERYWHERE,
        when: When = ALWAYS,
    ) -> None:
        """Replace the results of products; the honest operands are multiplied before, and the result is dropped."""
        from quantexp.quant.attention.tile_products import TileProducts
        from quantexp.quant.sites import operands_of

        def chosen(module: ModuleId, slots: Sequence[Slot]) -> bool:
            return any(where.holds(module, slot) for slot in slots) and when.holds(self.place)

        def changed(multiplication: Multiplication) -> Tensor:
            if multiplication.a.numel() == 0 or multiplication.b.numel() == 0:
                return multiplication.y
            result = change(multiplication)
            if result is None:
                return multiplication.y
            self.fire()
            return result.reshape(multiplication.y.shape).to(multiplication.y.dtype)

        def multiply_operands(original: Any) -> Any:
            def multiplied(
                precision: ModulePrecision, left: Any, right: Any, **named: Any
            ) -> Tensor:
                y = original(precision, left, right, **named)
                slots = (left.slot, right.slot)
                if not chosen(precision.module, slots):
                    return y
                a, b = (
                    factor.matrix(_other(precision.spec(factor.slot), factor.x))
                    for factor in (left, right)
                )
                if b.dim() == 2:
                    a = a.flatten(0, -2)
                scale = named.get("scale", 1.0)
                product = left.slot.product
                return changed(
                    Multiplication(precision.module, product, slots, a, b, a, b, y, scale, self)
                )

            return multiplied

        def product(original: Any) -> Any:
            def multiplied(
                work: Any,
                site: Any,
                product: Product,
                tile: Any,
                left: Tensor,
                right: Tensor,
                *more: Any,
                **named: Any,
            ) -> Tensor:
                y = original(work, site, product, tile, left, right, *more, **named)
                slots = operands_of(site, product)
                if not chosen(work.precision.module, slots):
                    return y
                a, b = (_tile_source(work, slot, tile, self.memory) for slot in slots)
                is_scores = (str(slots[0]), str(slots[1])) == ("qk.fprop.q", "qk.fprop.k")
                scale = work.call.softmax_scale if is_scores else 1.0
                return changed(
                    Multiplication(
                        work.precision.module, product, slots, a, b, left, right, y, scale, self
                    )
                )

            return multiplied

        def quantised_tile(original: Any) -> Any:
            def remembered(work: Any, slot: Slot, tile: Any, x: Tensor) -> Tensor:
                self.memory["tile", slot] = x
                return original(work, slot, tile, x)

            return remembered

        def quantised_tile_pair(original: Any) -> Any:
            def remembered(work: Any, first: Slot, second: Slot, tile: Any, x: Tensor) -> Any:
                self.memory["tile", first] = self.memory["tile", second] = x
                return original(work, first, second, tile, x)

            return remembered

        self.function("multiply_operands", multiply_operands)
        self.method(TileProducts, "product", product)
        self.method(TileProducts, "quantised_tile", quantised_tile)
        self.method(TileProducts, "quantised_tile_pair", quantised_tile_pair)

    # Maps

    def maps(
        self, change: Callable[[ModuleId, Slot, QuantSpec], QuantSpec | None], when: When = ALWAYS
    ) -> None:
        """Give modules other declarations than those of the run; None leaves a slot's."""

        def make(original: Any) -> Any:
            def set_precision(model: Any, precision: PrecisionMap, *more: Any, **named: Any) -> Any:
                if not when.holds(self.place):
                    return original(model, precision, *more, **named)
                return original(model, self._other_map(precision, change), *more, **named)

            return set_precision

        self.function("set_precision", make)

    def _other_map(self, precision: PrecisionMap, change: Any) -> PrecisionMap:
        result: PrecisionMap = {}
        for name, module in precision.items():
            slots = dict(module.slots)
            for slot, spec in module.slots.items():
                other = change(name, slot, spec)
                if other is not None and (other != spec or other.stream != spec.stream):
                    self.fire()
                    stream = other.stream or f"{name} {slot}"
                    slots[slot] = replace(other, stream=stream)
            result[name] = ModulePrecision(name, slots)
        return result

    @cached_property
    def generator(self) -> torch.Generator:
        """Random numbers of the fault's own."""
        return torch.Generator().manual_seed(42)

    def noise(self, x: Tensor) -> Tensor:
        """Normal numbers of x's standard deviation, unrelated to it."""
        noise = torch.randn(x.shape, generator=self.generator)
        return (noise * x.float().std(unbiased=False)).to(x.dtype)


def _other(spec: QuantSpec, x: Tensor) -> Tensor:
    """x as it is if it should be quantised, and quantised if it should not be."""
    x = x.detach()
    return x if spec.quantised else quantise(x.contiguous(), "mxfp4")


def _tile_source(work: Any, slot: Slot, tile: Any, memory: dict[Any, Any]) -> Tensor:
    """The operand of a tile's product before quantisation, as a stack of matrices."""
    from quantexp.quant.attention.tile_products import _TRANSPOSED

    if slot.operand in (Name.P, Name.DS):
        x = memory["tile", slot]
    else:
        extent = tile.rows if slot.operand in (Name.Q, Name.DO) else tile.keys
        x = work._by_head(slot.operand, work.tensors[slot.operand])[:, extent]
    x = _other(work.spec(slot), x)
    return x.transpose(1, 2) if slot in _TRANSPOSED else x


def is_stochastic(spec: QuantSpec) -> bool:
    """Whether it draws random numbers to round."""
    return spec.rounding is Rounding.STOCHASTIC


def _import_all() -> None:
    """Every module in which something is replaced."""
    from importlib import import_module

    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    for name in (
        *("trainer", "step", "linear", "attention", "embedding"),
        *("experts", "latent", "model", "passes"),
    ):
        import_module(f"quantexp.training.megatron.{name}")
    for name in ("training.gradients", "extras.evaluate.evaluator"):
        import_module(f"quantexp.{name}")
