"""The reader of YAML files that this program has written: plain values, no aliases, no tags, bounded.

An alias makes a text of some lines into a value of any size. This program writes none, so none is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from quantexp.errors import UnreadableError
from quantexp.reading.files import MOST_LEVELS, read_text

#: Bytes of a file, and digits of a number.
MOST_BYTES, _MOST_DIGITS = 1 << 22, 400
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(file: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: names the file, and the line where YAML has one.
    """
    return yaml_of(read_text(file, MOST_BYTES), file)


def yaml_of(text: str, file: Path) -> dict[str, Any]:
    """The keys and values of a text from a YAML file.

    Raises:
        UnreadableError: as `read_yaml`.
    """
    _require_bounded(text, file)
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise _wrong(file, error) from error
    except (ValueError, OverflowError) as error:  # the 99th month, and the like
        raise UnreadableError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        raise UnreadableError(f"{file} must hold keys with values, got {kind}")
    return content


def repeated_key(file: Path) -> str | None:
    """A key that a mapping of the file has twice, of which `read_yaml` takes the last; None without one.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: as `read_yaml_text`.
    """
    nodes = [yaml.compose(read_yaml_text(file), _Loader)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [str(key.value) for key, _ in node.value]
            if len(set(keys)) < len(keys):
                return next(key for key in keys if keys.count(key) > 1)
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return None


def read_yaml_text(file: Path) -> str:
    """The text of a YAML file, for a loader with types of its own, which may then recurse and copy.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: it is no YAML, or exceeds a bound, or has an alias or a tag.
    """
    text = read_text(file, MOST_BYTES)
    _require_bounded(text, file)
    return text


def _require_bounded(text: str, file: Path) -> None:
    """Refuse a text that is no YAML, exceeds a bound, or has an alias or a tag."""
    levels = 0
    try:
        for event in yaml.parse(text, _Loader):
            levels += isinstance(event, yaml.CollectionStartEvent)
            levels -= isinstance(event, yaml.CollectionEndEvent)
            if words := _refusal(event, levels):
                line = 1 + getattr(event.start_mark, "line", 0)
                raise UnreadableError(f"{file}, line {line}: {words}")
    except yaml.YAMLError as error:
        raise _wrong(file, error) from error


def _refusal(event: yaml.Event, levels: int) -> str | None:
    if isinstance(event, yaml.AliasEvent):
        return f"it must have no alias, got *{event.anchor}"
    if levels > MOST_LEVELS:
        return f"it must have at most {MOST_LEVELS} levels"
    if (tag := getattr(event, "tag", None)) is not None:
        return f"it must have no tag, got {tag}"
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
        digits = len(event.value)
        if digits > _MOST_DIGITS and set(event.value) <= set("0123456789abcdefxABCDEF+-_.:"):
            return f"a number must have at most {_MOST_DIGITS} digits, got {digits}"
    return None


def _wrong(file: Path, error: yaml.YAMLError) -> UnreadableError:
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}" if mark is not None else ""
    words = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is no YAML"
    return UnreadableError(f"{file}{where}: {words}")
