"""The YAML of a scheme that an analysis writes: the four sites in the working precision, then formats and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_HEAD = """\
# {about}
# Run it with: quantexp --config-dir FOLDER quant={name}, where FOLDER is the one that holds quant/{name}.yaml.
defaults:
  - /quant/linear@linear: none
  - /quant/qk@qk: none
  - /quant/pv@pv: none
  - /quant/output@output: none
  - _self_

name: {name}
"""
#: A rule is one line.
_WIDTH = 1 << 20


def scheme_path(folder: Path, name: str) -> Path:
    """The path of a scheme in an output folder: `quantexp --config-dir FOLDER quant=NAME` finds it there."""
    return folder / "quant" / f"{name}.yaml"


def scheme_yaml(
    name: str, about: str, content: Mapping[str, Any], rules: Sequence[Mapping[str, Any]]
) -> str:
    """The text of a scheme; `about` is its first line, `content` its keys besides the rules."""
    text = _HEAD.format(about=about, name=name)
    if content:
        text += yaml.safe_dump(dict(content), default_flow_style=None, sort_keys=False)
    if rules:
        text += "rules:\n" + "".join(f"  - {rule_line(rule)}\n" for rule in rules)
    return text


def rule_line(rule: Mapping[str, Any]) -> str:
    """A rule as it stands in a file, and in a word of the command line."""
    line = yaml.safe_dump(dict(rule), default_flow_style=True, sort_keys=False, width=_WIDTH)
    return str(line).strip()
