"""Writes a recommendation as a scheme: four sites in the working precision, and rules by module and slot.

Slots with the same settings share a rule. The file is `quant/recommended.yaml` below the output folder, so that
`quantexp --config-dir FOLDER quant=recommended` trains with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from quantexp.analysis.requantise.recommend import Choice

NAME = "recommended"
_HEAD = """\
# Recommended by `quantexp requantise`: {why}
# Run it with: quantexp --config-dir FOLDER quant={name}, where FOLDER is the one that holds quant/{name}.yaml.
defaults:
  - /quant/linear@linear: none
  - /quant/qk@qk: none
  - /quant/pv@pv: none
  - /quant/output@output: none
  - _self_

name: {name}
"""
#: Modules without a name in older captures: their rules apply to the whole site.
_UNNAMED = ("linear",)
#: A rule is one line.
_WIDTH = 1 << 20


def scheme_path(folder: Path) -> Path:
    """The path of the scheme in an output folder."""
    return folder / "quant" / f"{NAME}.yaml"


def scheme_text(choices: Sequence[Choice], sqnr_db: float) -> str:
    """The YAML; without rules if every slot stays in the working precision."""
    why = f"the worst tensor of every slot keeps {sqnr_db:g} dB."
    rules = _rules(choices)
    text = _HEAD.format(why=why, name=NAME) + _formats(choices)
    if not rules:
        return text
    lines = [
        yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=_WIDTH)
        for rule in rules
    ]
    return text + "rules:\n" + "".join(f"  - {line}" for line in lines)


def _formats(choices: Iterable[Choice]) -> str:
    """The definitions of the declared formats among the choices; empty without any."""
    formats = [choice.candidate.format for choice in choices if choice.candidate is not None]
    definitions = {fmt.name: json.loads(fmt.definition) for fmt in formats if fmt.definition}
    if not definitions:
        return ""
    return yaml.safe_dump({"formats": definitions}, default_flow_style=None, sort_keys=False)


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
