"""Checks plain values, as JSON and YAML have them, against a type: `loss must be a number, got 'abc'`.

A type is a dataclass, a TypedDict, or what their fields may be: bool, int, float (a whole number too), str, None, an
Enum by its values, list, tuple, dict, unions of these, Any, and Annotated with a `Rule` or `Like`. A dataclass has only
its own keys, and a TypedDict may have others.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")
#: Metadata of a dataclass's field that has a default in code and none in a file.
REQUIRED: Mapping[str, bool] = types.MappingProxyType({"required": True})
#: Converts a value, or raises `WrongTypeError`.
_Check = Callable[[Any], Any]
#: Characters of a value in a message.
_MOST_SHOWN = 40


class WrongTypeError(ValueError):
    """A value of another type; names its key."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words, self.key = words, ""

    def __str__(self) -> str:
        return f"{self.key or 'it'} {self.words}"

    def below(self, key: str) -> WrongTypeError:
        """The same error of a value that is below this key."""
        separator = "." if self.key and not self.key.startswith("[") else ""
        self.key = f"{key}{separator}{self.key}"
        return self


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must be besides its type: `Annotated[str, Rule("a time", is_time)]`."""

    words: str
    holds: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Like:
    """A narrower type that a value is checked against: `Annotated[dict[str, Any], Like(Point)]`."""

    kind: Any


#: A whole number from 0, which any file system, array and clock can count.
Count = typing.Annotated[int, Rule("a whole number from 0", lambda n: 0 <= n < 1 << 63)]


def typed(value: Any, kind: type[_Kind]) -> _Kind:
    """The value as an instance of its type; lists and dicts are converted in place.

    Raises:
        WrongTypeError: names the key, what it must be, and what it is.
    """
    converted: _Kind = _check(kind)(value)  # type: ignore[arg-type]
    return converted


def check_known(value: Any, kind: type) -> None:
    """Check those keys of nested dicts that a dataclass has; an Enum may have any name.

    What another version has more or less is left alone.

    Raises:
        WrongTypeError: names the key, what it must be, and what it is.
    """
    _require_keys(value)
    for name, is_optional, check in _known_keys(kind):
        if name not in value or (value[name] is None and is_optional):
            continue
        try:
            check(value[name])
        except WrongTypeError as error:
            raise error.below(name) from None


@cache
def _known_keys(kind: type) -> list[tuple[str, bool, _Check]]:
    """Of each key: its name, whether it may be null, and its check."""
    keys: list[tuple[str, bool, _Check]] = []
    for name, hint in typing.get_type_hints(kind).items():
        each = _without_none(hint)
        if dataclasses.is_dataclass(each):
            check: _Check = partial(check_known, kind=typing.cast(type, each))
        elif isinstance(each, type) and issubclass(each, Enum):
            check = _check(str)
        elif each in _PLAIN:
            check = _check(each)
        else:
            continue
        keys.append((name, _is_optional(hint), check))
    return keys


def _is_optional(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)


def _without_none(hint: Any) -> Any:
    """The type of an optional value; a union of several types stays as it is."""
    others = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return others[0] if _is_optional(hint) and len(others) == 1 else hint


@cache
def _check(kind: Any) -> _Check:
    if kind in (Any, object):
        return lambda value: value
    if kind in _PLAIN:
        return _plain(*_PLAIN[kind])
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if typing.is_typeddict(kind):
        return _typed_dict(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotated(*arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is list:
        return _list(arguments[0])
    assert origin is dict, kind
    return _dict(arguments[1])


#: Type -> the types that serve, and its name in a message.
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str,), "a text"),
    types.NoneType: ((types.NoneType,), "null"),
}


def _plain(serving: tuple[type, ...], words: str) -> _Check:
    def check(value: Any) -> Any:
        if type(value) not in serving:
            raise _wrong(words, value)
        return value

    return check


def _enum(kind: type[Enum]) -> _Check:
    members = [member.value for member in kind]

    def check(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise _wrong(f"one of {', '.join(map(str, members))}", value) from None

    return check


def _annotated(kind: Any, rule: Rule | Like) -> _Check:
    if isinstance(rule, Like):
        return _check(rule.kind)
    serving, holds = _PLAIN[kind][0], rule.holds

    def check(value: Any) -> Any:
        if type(value) in serving and holds(value):
            return value
        raise _wrong(rule.words, value)

    return check


def _union(kinds: tuple[Any, ...]) -> _Check:
    if all(kind in _PLAIN for kind in kinds):
        serving = tuple(itertools.chain.from_iterable(_PLAIN[kind][0] for kind in kinds))
        return _plain(serving, " or ".join(_PLAIN[kind][1] for kind in kinds))
    may_be_none = types.NoneType in kinds
    checks = [_check(kind) for kind in kinds if kind is not types.NoneType]

    def check(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        errors = []
        for one in checks:
            try:
                return one(value)
            except WrongTypeError as error:
                errors.append(error)
        raise errors[0]

    return check


def _list(element: Any) -> _Check:
    check_element = _check(element)

    def check(value: Any) -> Any:
        if type(value) is not list:
            raise _wrong("a list", value)
        return _each(zip(itertools.repeat(check_element), value, strict=False))

    return check


def _tuple(kinds: tuple[Any, ...]) -> _Check:
    """A tuple with a type for each of its elements."""
    checks = [_check(kind) for kind in kinds]

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != len(checks):
            raise _wrong(f"a list of {len(checks)}", value)
        return tuple(_each(zip(checks, value, strict=True)))

    return check


def _each(pairs: Iterable[tuple[_Check, Any]]) -> list[Any]:
    converted: list[Any] = []
    try:
        for check, value in pairs:
            converted.append(check(value))
    except WrongTypeError as error:
        raise error.below(f"[{len(converted)}]") from None
    return converted


def _dict(content: Any) -> _Check:
    check_content = _check(content)

    def check(value: Any) -> Any:
        _require_keys(value)
        if content is not Any:
            name = ""
            try:
                for name, each in value.items():
                    value[name] = check_content(each)
            except WrongTypeError as error:
                raise error.below(_shown_key(name)) from None
        return value

    return check


def _typed_dict(kind: Any) -> _Check:
    checks = _checks(kind)
    # not __required_keys__, which knows no marker inside of a string
    required = [name for name, hint in _hints(kind).items() if _is_required(hint, kind)]

    def check(value: Any) -> Any:
        _require_keys(value)
        _require(required, value)
        return _values(value, checks)

    return check


def _dataclass(kind: Any) -> _Check:
    checks = _checks(kind)
    required = [
        field.name
        for field in dataclasses.fields(kind)
        if (field.default is field.default_factory is dataclasses.MISSING) or field.metadata
    ]

    def check(value: Any) -> Any:
        _require_keys(value)
        for name in value:
            if name not in checks:
                raise WrongTypeError("is a key of another version").below(_shown_key(name))
        _require(required, value)
        return kind(**_values(value, checks))

    return check


def _checks(kind: Any) -> dict[str, _Check]:
    return {name: _check(_without_markers(hint)) for name, hint in _hints(kind).items()}


def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _is_required(hint: Any, kind: Any) -> bool:
    marker = typing.get_origin(hint)
    return marker is typing.Required or (kind.__total__ and marker is not typing.NotRequired)


def _without_markers(hint: Any) -> Any:
    """A field's type without NotRequired or Required, which say something of its key."""
    markers = (typing.NotRequired, typing.Required)
    return typing.get_args(hint)[0] if typing.get_origin(hint) in markers else hint


def _values(value: dict[str, Any], checks: Mapping[str, _Check]) -> dict[str, Any]:
    name = ""
    try:
        for name, each in value.items():
            if (check := checks.get(name)) is not None:
                value[name] = check(each)
    except WrongTypeError as error:
        raise error.below(_shown_key(name)) from None
    return value


def _require_keys(value: Any) -> None:
    if type(value) is not dict:
        raise _wrong("keys with values", value)


def _require(names: Iterable[str], value: Mapping[str, Any]) -> None:
    for name in names:
        if name not in value:
            raise WrongTypeError("is missing").below(name)


def _shown_key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else _cut(ascii(name))


def _wrong(words: str, value: Any) -> WrongTypeError:
    if isinstance(value, dict | list):
        shown = "keys with values" if isinstance(value, dict) else "a list"
    else:
        shown = "null" if value is None else repr(value)
    return WrongTypeError(f"must be {words}, got {_cut(shown)}")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
