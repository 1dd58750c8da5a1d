"""Which products a drawn check looks at in an iteration.

Each iteration looks at all products of some linear layers and of some attention modules. Where it is so short that this
would take a noticeable part of it, the first `THOROUGH` look at all modules, and each later one at a single product, of
every kind (`KINDS`) in turn. A fault of all products of a kind is then found in the iteration in which it begins or in
one of the next five, one of a single product when its turn comes.

Whose turn it is follows from the seed, the iteration and the names of the modules; in which micro-batch and at which
lines, from the seed besides. All ranks that share a module look at it together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

from quantexp.formats import Scaling
from quantexp.model.decoder import is_routed
from quantexp.proof.border import Unit
from quantexp.quant.precision import ModuleId, ModulePrecision, PrecisionMap
from quantexp.quant.sites import Product, Site

_LINEAR_BACKWARD = (Site.LINEAR, Product.DGRAD), (Site.LINEAR, Product.WGRAD)
_ATTENTION = (Site.QK, Product.FPROP), (Site.PV, Product.FPROP)
_ATTENTION_BACKWARD = (
    *((Site.QK, Product.DGRAD_Q), (Site.QK, Product.DGRAD_K)),
    *((Site.PV, Product.DGRAD_P), (Site.PV, Product.DGRAD_V)),
)
#: The kinds of products, in the order of their turns in short iterations.
KINDS: tuple[tuple[Unit, ...], ...] = (
    ((Site.LINEAR, Product.FPROP),),
    _ATTENTION_BACKWARD,
    *((unit,) for unit in _LINEAR_BACKWARD),
    _ATTENTION,
)
#: The kinds of modules, by their products.
MODULES = KINDS[0] + _LINEAR_BACKWARD, _ATTENTION + _ATTENTION_BACKWARD
#: An iteration's floating-point operations for a look at one more module of each kind.
_FLOPS_EACH = 1e11
#: Modules of a kind that an iteration looks at, at most.
_MOST = 2
#: Short iterations that look at all modules, after a complete proof.
THOROUGH = 4


def number_of_looks(flops: float) -> int:
    """How many modules of each kind an iteration with so many operations on a rank looks at; 0 means one product."""
    return min(_MOST, int(flops / _FLOPS_EACH))


#: Some products of a module.
Look = tuple[ModuleId, tuple[Unit, ...]]


class Turns:
    """Whose turn it is.

    The modules that every rank of a group has take turns in one order; a routed expert's turn follows from its name.

    Args:
        declared: the map of this rank's modules.
        seed: the run's.
        looks: see `number_of_looks`.
        num_micro_batches: of a rank in an iteration, each module being looked at in one, or in all if it has delayed
            scales, as its amax histories follow from all; 0 for all passes.
    """

    def __init__(
        self, declared: PrecisionMap, seed: int, looks: int, num_micro_batches: int
    ) -> None:
        self._seed, self._looks, self._num_micro_batches = seed, looks, num_micro_batches
        self._declared = declared
        #: Whether iterations are so short that most of them look at one product.
        self.are_short = not looks
        #: The first iteration that was asked for.
        self._first: int | None = None
        #: By what has turns: the last round, and the repeats up to it.
        self._rounds: dict[str, tuple[int, int]] = {}
        #: By kind, the looks at shared modules in their order, and at routed experts with their numbers.
        self._kinds: list[tuple[list[Look], list[tuple[int, Look]]]] = []
        self._delayed = {
            name
            for name, module in declared.items()
            if any(spec.scaling is Scaling.DELAYED for spec in module.slots.values())
        }
        for kind in MODULES if looks else KINDS:
            all_looks = [
                look
                for name, module in declared.items()
                for look in _looks(name, module, kind, looks)
            ]
            shared = [look for look in all_looks if not is_routed(look[0].name)]
            routed = [(_number(seed, n), (n, u)) for n, u in all_looks if is_routed(n.name)]
            if all_looks:
                order = Random(f"{seed} {kind}").sample(shared, len(shared))
                self._kinds.append((order, routed))

    def of(self, iteration: int) -> dict[ModuleId, dict[Unit, int | None]]:
        """The products to look at in an iteration, and in which micro-batch, by module."""
        kinds, turn, looks = self._kinds, iteration, self._looks
        if self.is_thorough(iteration):
            return {
                name: dict.fromkeys((slot.site, slot.product) for slot in module.slots)
                for name, module in self._declared.items()
            }
        if kinds and not looks:
            kinds = [kinds[self.whose("kind", iteration, len(kinds))]]
            turn, looks = iteration // len(self._kinds), 1
        chosen: dict[ModuleId, dict[Unit, int | None]] = {}
        for shared, routed in kinds:
            number = min(looks, len(shared))
            label = str(shared[:1])
            places = (self.whose(label, turn * number + n, len(shared)) for n in range(number))
            now = [shared[place] for place in places]
            every = max(1, len(routed) // looks)
            now += [look for place, look in routed if (place + turn) % every == 0]
            for name, units in now:
                chosen[name] = dict.fromkeys(units, self._index(iteration, name))
        return chosen

    def whose(self, label: str, turn: int, number: int) -> int:
        """Which of a number of candidates has a turn: one after another, at most `number` + 1 turns apart.

        After a round, with a probability of one half, the last one has another turn. A fault in every tenth or
        hundredth iteration then meets all candidates, and not always the same few.
        """
        last, repeats = self._rounds.get(label, (0, 0))
        current = turn // number
        if current < last:
            last, repeats = 0, 0
        for each in range(last + 1, current + 1):
            repeats += _number(self._seed, label, each) % 2
        self._rounds[label] = current, repeats
        return (turn - repeats) % number

    def are_in_forward(self, turn: int) -> bool:
        """Whether the borders of an iteration stand in the modules' forward in place of hooks: in one of two."""
        return bool((_number(self._seed, "forward", turn // 2) + turn) % 2)

    def has_contrasts(self, turn: int) -> bool:
        """Whether results of fused attention are compared with alternatives: in one of four short iterations."""
        is_due = _number(self._seed, "contrasts", turn) % 4 == 0
        return is_due or not self.are_short or self.is_thorough(turn)

    def is_thorough(self, iteration: int) -> bool:
        """Whether an iteration, or one before it, is the first of a few that look at all modules."""
        if self._first is None:
            self._first = iteration
        return self.are_short and iteration < self._first + THOROUGH

    def _index(self, iteration: int, name: ModuleId) -> int | None:
        """The micro-batch to look at, the same on all ranks that share the module."""
        if not self._num_micro_batches or name in self._delayed:
            return None
        if self._num_micro_batches == 1:
            return 0
        return _number(self._seed, iteration, name) % self._num_micro_batches


def _looks(name: ModuleId, module: ModulePrecision, kind: Sequence[Unit], looks: int) -> list[Look]:
    """The looks at a module's products of a kind: one at all, or one at each."""
    own = {(slot.site, slot.product) for slot in module.slots}
    units = tuple(unit for unit in kind if unit in own)
    return [(name, units)] * bool(units) if looks else [(name, (unit,)) for unit in units]


def _number(*words: object) -> int:
    text = " ".join(map(str, ("turn", *words)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
