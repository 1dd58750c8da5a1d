"""Writes a recommendation as a scheme: four sites in the working precision, and rules by module and slot.

Slots with the same settings share a rule. The file is `quant/recommended.yaml` below the output folder, so that
`quantexp --config-dir FOLDER quant=recommended` trains with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from quantexp.analysis.scheme_yaml import scheme_yaml
from quantexp.extras.requantise.recommend import Choice

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
