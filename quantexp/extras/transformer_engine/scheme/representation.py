"""The recipe of Transformer Engine that represents the slots of a linear module, and how near it is.

A recipe holds all six operands at once, so that one slot decides against it: a scheme is represented or refused, never
bent. How near a recipe is was found by reading its kernels and emulating them on a CPU (docs/backends.md); no GPU has
confirmed it. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from quantexp.extras.transformer_engine.scheme.operands import Held, held
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe, native_recipes
from quantexp.formats.types import Scaling
from quantexp.quant.precision import Slots
from quantexp.quant.sites import Slot
from quantexp.schema import NamedRecipe


class Nearness(Enum):
    """How the operands that Transformer Engine multiplies compare with those that quantexp emulates."""

    #: The same codes and scales; products differ by the order of sums.
    BIT_EQUAL = "bit-equal operands"
    #: The same values up to the last bit of a few.
    NEAR_EQUAL = "near-equal operands"
    #: The same distribution, or another history: single values differ.
    STATISTICAL = "statistical only"


@dataclass(frozen=True)
class Representation:
    """The recipe of a module; None multiplies in the working precision."""

    recipe: Recipe | None
    nearness: Nearness = Nearness.BIT_EQUAL
    #: What differs from the emulation; empty if nothing but the order of sums.
    why: str = ""


@dataclass(frozen=True)
class Unrepresentable:
    """The slot that no recipe holds together with the others, and how the nearest recipe differs there."""

    slot: Slot
    nearest: Recipe
    aspect: str
    got: str
    wanted: str
    #: Whether the nearest recipe holds other operands of the module.
    is_partial: bool = False
    #: Whether no recipe has its element at all.
    is_unknown: bool = False
    is_delayed: bool = False

    def __str__(self) -> str:
        """`has scale powers of two by floor, and MXFP8BlockScaling(E4M3) powers of two by rceil`."""
        if self.is_delayed:
            return (
                "has scaling delayed, by powers of two and iterations, and Transformer Engine's has neither; take "
                "quant=more/te_fp8_delayed, which scales as it does"
            )
        if self.is_unknown:
            return f"has element {self.got}, and no recipe of Transformer Engine has it"
        holds = ", which holds the module's other operands," if self.is_partial else ""
        return f"has {self.aspect} {self.got}, and {self.nearest}{holds} has {self.wanted}"


def represent(slots: Slots, named: NamedRecipe | None = None) -> Representation | Unrepresentable:
    """The recipe with exactly these slots of a linear module, or the first slot in which the nearest one differs.

    `named` is the recipe that the scheme takes by name, for what slots cannot describe.
    """
    own = {slot: held(spec) for slot, spec in slots.items()}
    if not any(spec.quantised for spec in slots.values()):
        return Representation(None)
    delayed = [(slot, spec) for slot, spec in slots.items() if spec.scaling is Scaling.DELAYED]
    history = delayed[0][1].window if delayed and named is NamedRecipe.delayed else None
    if delayed and history is None:
        slot, _ = delayed[0]
        nearest = Recipe(Kind.DELAYED)
        return Unrepresentable(slot, nearest, "scale", own[slot].scale, "its own", is_delayed=True)
    recipes = list(native_recipes(history))
    nearest = min(recipes, key=lambda recipe: _distance(own, recipe))
    if not (differing := _differing(own, nearest)):
        return Representation(nearest, *_nearness(nearest))
    slot = differing[0]
    wanted = nearest.slots()[slot]
    aspect = own[slot].differs(wanted)
    assert aspect is not None
    known = {each.element for recipe in recipes for each in recipe.slots().values()}
    return Unrepresentable(
        slot,
        nearest,
        aspect,
        getattr(own[slot], aspect),
        getattr(wanted, aspect),
        is_partial=len(differing) < len(own),
        is_unknown=slots[slot].quantised and own[slot].element not in known,
    )


def _distance(own: dict[Slot, Held], recipe: Recipe) -> tuple[int, int]:
    """Slots that differ, and those that differ in the element."""
    differing = _differing(own, recipe)
    wanted = recipe.slots()
    return len(differing), sum(own[slot].element != wanted[slot].element for slot in differing)


def _differing(own: dict[Slot, Held], recipe: Recipe) -> list[Slot]:
    return [slot for slot, wanted in recipe.slots().items() if own[slot] != wanted]


def _nearness(recipe: Recipe) -> tuple[Nearness, str]:
    match recipe.kind:
        case Kind.CURRENT if not recipe.power_of_two:
            return (
                Nearness.NEAR_EQUAL,
                "codes and scales are equal; the emulation rounds code / scale to the working precision",
            )
        case Kind.BLOCK if not recipe.power_of_two:
            return (
                Nearness.NEAR_EQUAL,
                "Transformer Engine divides by the scale's float32 reciprocal",
            )
        case Kind.NVFP4 if not (recipe.hadamard or recipe.stochastic):
            return (
                Nearness.NEAR_EQUAL,
                "about 3 in 10,000 block scales and 5 in 10,000 codes differ by the order of operations",
            )
        case Kind.NVFP4:
            return (
                Nearness.STATISTICAL,
                "Transformer Engine draws other random bits and has one fixed vector of signs",
            )
        case Kind.DELAYED:
            return (
                Nearness.STATISTICAL,
                f"Transformer Engine's scale is max / amax of the last {recipe.history} micro-batches, 1 for the "
                "first, and is updated after each",
            )
    return Nearness.BIT_EQUAL, ""


def weakest(each: Iterable[Nearness]) -> Nearness:
    """The furthest of several; bit-equal for none."""
    order = list(Nearness)
    return max(each, key=order.index, default=Nearness.BIT_EQUAL)
