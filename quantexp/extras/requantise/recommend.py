"""Recommends for each module and slot the cheapest candidate whose worst tensor reaches an SQNR; writes the scheme.

Cheapest is of the fewest bits an element; of those, the first (usual options come before others) within a tenth of a
decibel of the highest SQNR. The two operands of a product must share their Hadamard transform, and the block of it, so
that it cancels: the transform is taken under which both together cost the fewest bits, none before deterministic before
random. The output layer's forward product takes none: an embedding may be tied to its weight. Where no candidate
reaches the SQNR, or an operand was not captured, it stays in the working precision, which takes no transform.

The scheme has four sites in the working precision, and rules by module and slot; slots with the same settings share a
rule. The file is `quant/recommended.yaml` below the output folder, so that
`quantexp --config-dir FOLDER quant=recommended` trains with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.scheme_yaml import scheme_yaml
from quantexp.analysis.tensors.place import in_flow
from quantexp.extras.requantise.candidates import WORKING_BITS, Candidate, Transform
from quantexp.extras.requantise.tally import Place, Tally, Worst, best_of
from quantexp.formats import Hadamard
from quantexp.quant.sites import LOOKUP_W, NORM_W, PRODUCTS, Product, Site, Slot, operands_of

_NO_TRANSFORM: Transform = (Hadamard.NONE, None)


@dataclass(frozen=True)
class Choice:
    """The recommendation for one slot of one module."""

    module: str
    slot: Slot
    #: None means the working precision.
    candidate: Candidate | None
    #: The SQNR of the candidate's worst tensor; None without a candidate.
    worst: Worst | None
    #: Whether any tensor of the slot was scored.
    captured: bool

    @property
    def bits(self) -> float:
        """Bits per element."""
        return WORKING_BITS if self.candidate is None else self.candidate.bits


def recommend(tally: Tally, sqnr_db: float) -> list[Choice]:
    """A choice for each slot of every site with a captured operand, with modules in the order of the forward pass."""
    sites: dict[str, list[Site]] = {}
    scored: dict[tuple[str, Slot], list[Worst]] = {}
    for place, worst in tally.worst.items():
        scored[place.module, place.slot] = worst
        sites.setdefault(place.module, []).append(place.slot.site)
    choices = []
    for module in in_flow(sites):
        for site in Site:
            if site not in sites[module]:
                continue
            for product in PRODUCTS[site]:
                choices += _of_product(tally, scored, module, operands_of(site, product), sqnr_db)
    return choices


def in_order(choices: Iterable[Choice], places: Iterable[Place]) -> list[Place]:
    """The scored places, in the order of the choices."""
    by_slot = {(place.module, place.slot): place for place in places}
    slots = [(choice.module, choice.slot) for choice in choices]
    return [by_slot[slot] for slot in slots if slot in by_slot]


def _of_product(
    tally: Tally,
    scored: dict[tuple[str, Slot], list[Worst]],
    module: str,
    slots: tuple[Slot, Slot],
    sqnr_db: float,
) -> list[Choice]:
    worst = [scored.get((module, slot)) for slot in slots]
    candidates = tally.work.candidates
    pairs = []
    # Only a product undoes a transform: the rows of an embedding and a norm have none.
    has_product = slots[1] not in (LOOKUP_W._replace(product=Product.FPROP), NORM_W)
    for transform in _transforms(candidates) if has_product else [_NO_TRANSFORM]:
        pair = [_cheapest(candidates, one, transform, sqnr_db) for one in worst]
        if transform == _NO_TRANSFORM or None not in pair:
            pairs.append(pair)
    best = min(pairs, key=lambda pair: sum(_bits(candidates, index) for index in pair))
    return [
        Choice(
            module,
            slot,
            None if index is None else candidates[index],
            None if index is None or one is None else one[index],
            captured=one is not None,
        )
        for slot, index, one in zip(slots, best, worst, strict=True)
    ]


def _transforms(candidates: Sequence[Candidate]) -> list[Transform]:
    """Each transform once, with no transform first."""
    transforms = dict.fromkeys(candidate.transform for candidate in candidates)
    return sorted(transforms, key=lambda transform: list(Hadamard).index(transform[0]))


def _cheapest(
    candidates: Sequence[Candidate],
    worst: Sequence[Worst] | None,
    transform: Transform,
    sqnr_db: float,
) -> int | None:
    """The index of the cheapest candidate with this transform; None if none reaches the SQNR."""
    if worst is None:
        return None
    fitting = [
        index
        for index, (candidate, one) in enumerate(zip(candidates, worst, strict=True))
        if candidate.transform == transform and one.sqnr_db >= sqnr_db
    ]
    fewest = min((candidates[index].bits for index in fitting), default=WORKING_BITS)
    return best_of((index for index in fitting if candidates[index].bits == fewest), worst)


def _bits(candidates: Sequence[Candidate], index: int | None) -> float:
    return WORKING_BITS if index is None else candidates[index].bits


NAME = "recommended"
#: Modules without a name in older captures: their rules apply to the whole site.
_UNNAMED = ("linear",)


def scheme_text(choices: Sequence[Choice], sqnr_db: float) -> str:
    """The YAML; without rules if every slot stays in the working precision."""
    about = f"Recommended by `quantexp requantise`: the worst tensor of every slot keeps {sqnr_db:g} dB."
    definitions = _formats(choices)
    content = {"formats": definitions} if definitions else {}
    return scheme_yaml(NAME, about, content, _rules(choices))


def _formats(choices: Iterable[Choice]) -> dict[str, Any]:
    """The definitions of the declared formats among the choices."""
    formats = [choice.candidate.format for choice in choices if choice.candidate is not None]
    return {fmt.name: json.loads(fmt.definition) for fmt in formats if fmt.definition}


def _rules(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """One rule for each slot and settings, with all its modules, in the order of the choices."""
    modules: dict[tuple[str, str, str, str], list[str]] = {}
    for choice in choices:
        if choice.candidate is not None:
            settings = json.dumps(choice.candidate.settings())
            slot = choice.slot
            key = (slot.site.value, slot.product.value, slot.operand.value, settings)
            modules.setdefault(key, []).append(choice.module)
    rules = []
    for (site, product, operand, settings), names in modules.items():
        named = {} if set(names) & set(_UNNAMED) else {"modules": [_pattern(n) for n in names]}
        covered = {"sites": [site], "products": [product], "operands": [operand]}
        rules.append({**named, **covered, **json.loads(settings)})
    return rules


def _pattern(module: str) -> str:
    return module.replace("expert-", "expert*-", 1) if module.startswith("expert-") else module
