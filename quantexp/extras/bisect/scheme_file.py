"""Writes a run's scheme with the rules that keep the culprit in bf16: `quant/bisected.yaml` below the output folder.

`quantexp --config-dir FOLDER quant=bisected` trains with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.analysis.scheme_yaml import rule_line, scheme_path, scheme_yaml
from quantexp.runs.disk import write_whole
from quantexp.schema import QuantConfig, Rule

NAME = "bisected"


def write_scheme(quant: QuantConfig, rules: Sequence[Rule], kept: str, folder: Path) -> Path:
    """Write the scheme with these rules after its own, and return the file's path."""
    changed = dataclasses.replace(quant, rules=[*quant.rules, *rules])
    content = _values(dataclasses.asdict(changed))
    listed = content.pop("rules", [])
    content.pop("name", None)
    about = f"{quant.name} with rules of `quantexp bisect` at its end, which keep in bf16: {kept}."
    path = scheme_path(folder, NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, scheme_yaml(NAME, about, content, listed))
    return path


def override(quant: QuantConfig, rules: Sequence[Rule]) -> str:
    """The same rules as a word of the command line, after the words that chose the run's scheme."""
    listed = [_values(dataclasses.asdict(rule)) for rule in (*quant.rules, *rules)]
    return f"quant.rules=[{', '.join(map(rule_line, listed))}]"


def _values(content: Any) -> Any:
    """The keys that have a value, as a YAML file has them; an empty list of parts takes parts away."""
    if isinstance(content, dict):
        values = {key: _values(value) for key, value in content.items()}
        return {
            key: value
            for key, value in values.items()
            if value not in (None, {}, []) or (key == "parts" and value == [])
        }
    if isinstance(content, list):
        return [_values(each) for each in content]
    return content.value if isinstance(content, Enum) else content
