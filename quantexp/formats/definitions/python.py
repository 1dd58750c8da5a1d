"""Formats that are Python classes of the user: `my_package.my_module:MyFormat`.

    class MyFormat:
        def quantise(self, x: Tensor, *, axis: int, generator: torch.Generator) -> Tensor: ...
        def contains(self, x: Tensor, axis: int) -> Tensor: ...        # optional

`quantise` returns values in x's shape and dtype; `generator` lies on x's device and is seeded from the run's seed, the
slot, the iteration and the micro-batch, so that a run repeats its numbers. `contains` says for each element, as bool of
x's shape, whether it is a value of the format; the proof of engagement asks it. Without it nobody can prove what ran.

Only a module that a configuration names is imported, and only by what quantises. A run records the digest of its source
and its text, and stops if the module that it imports is another.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from quantexp.errors import FormatError
from quantexp.formats.types import Element, Family, Format, Rounding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The keys of a definition.
PYTHON, DIGEST = "python", "source_sha256"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
#: What is known of its values: nothing, so that a plan counts those of the working precision.
_UNKNOWN = Element("python", 16, emin=-126, emax=127, mantissa_bits=7, max=float("inf"))


class PythonFormat(Protocol):
    """What a class must have."""

    def quantise(self, x: Tensor, *, axis: int, generator: torch.Generator) -> Tensor:
        """The values of x in the format, in x's shape and dtype."""


class ProvedFormat(PythonFormat, Protocol):
    """A class that says which values are its own."""

    def contains(self, x: Tensor, axis: int) -> Tensor:
        """Whether each element is a value of the format, bool of x's shape."""


def is_python(name: str) -> bool:
    """Whether a name is one of a Python class."""
    return _NAME.fullmatch(name) is not None


def python_definition(name: str) -> dict[str, str]:
    """The definition of a Python format: its name, and the digest of its module's source.

    Raises:
        FormatError: there is no such module, or it has no source.
    """
    return {PYTHON: name, DIGEST: hashlib.sha256(source_file(name).read_bytes()).hexdigest()}


def source_file(name: str) -> Path:
    """The file of a format's module, which is not imported; the packages it lies in are.

    Raises:
        FormatError: there is no such module, or it has no source.
    """
    module = name.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except Exception as error:  # a package of it is imported, and may raise anything
        raise FormatError(f"the module of the format {name} cannot be found: {error}") from error
    if spec is None:
        raise FormatError(
            f"there is no module {module} for the format {name}; install it, or put its folder in PYTHONPATH"
        )
    if not spec.origin or not spec.origin.endswith(".py"):
        raise FormatError(f"the module {module} of the format {name} has no source file")
    return Path(spec.origin)


def python_name(fmt: Format) -> str:
    """`package.module:Class` of a format of the family `python`."""
    return str(json.loads(fmt.definition)[PYTHON])


def python_format(name: str, content: dict[str, Any], definition: str) -> Format:
    """The format of a definition with the key `python`; nothing is imported.

    Raises:
        ValueError: keys that are none of such a definition.
    """
    unknown = [key for key in content if key not in (PYTHON, DIGEST)]
    if unknown:
        raise ValueError(
            f"unknown key {unknown[0]}; a format in Python has {PYTHON} alone, its class decides all else"
        )
    if not isinstance(content[PYTHON], str) or not is_python(content[PYTHON]):
        raise ValueError(f"{PYTHON} must be package.module:Class, got {content[PYTHON]!r}")
    return Format(
        name,
        Family.PYTHON,
        _UNKNOWN,
        block=None,
        scale_rule=None,
        rounding=Rounding.EVEN,
        options=frozenset({"seed", "offset"}),
        definition=definition,
    )


@cache
def instance_of(name: str, digest: str | None) -> PythonFormat:
    """The format's object, one in a process; its module is imported.

    Raises:
        FormatError: the module cannot be imported, has no such class, or another source than the digest's; or the class
            has no `quantise`.
    """
    actual = python_definition(name)[DIGEST]
    if digest is not None and actual != digest:
        raise FormatError(
            f"the source of the format {name} has changed since the run was composed ({digest[:8]}, now {actual[:8]}); "
            "start a new run, or put the file back"
        )
    module, _, kind = name.partition(":")
    try:
        instance = getattr(importlib.import_module(module), kind)()
    except Exception as error:  # the user's code, which may raise anything
        raise FormatError(f"the format {name} cannot be made: {error}") from error
    if not callable(getattr(instance, "quantise", None)):
        raise FormatError(
            f"the format {name} must have quantise(x, *, axis, generator), see docs/formats/your_own.md"
        )
    result: PythonFormat = instance
    return result


@cache
def defines_contains(name: str) -> bool:
    """Whether the class, or a base of it in its module, defines `contains`, by the source; nothing is imported.

    Raises:
        FormatError: as `source_file`, or the source is no Python.
    """
    file = source_file(name)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError as error:
        raise FormatError(f"{file}, line {error.lineno}: {error.msg}; correct the file") from error
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    left, seen = [name.partition(":")[2]], set[str]()
    while left:
        kind = classes.get(left.pop())
        if kind is None or kind.name in seen:
            continue
        seen.add(kind.name)
        if any(isinstance(node, ast.FunctionDef) and node.name == "contains" for node in kind.body):
            return True
        left += [base.id for base in kind.bases if isinstance(base, ast.Name)]
    return False


def can_be_proved(fmt: PythonFormat) -> TypeGuard[ProvedFormat]:
    """Whether its class has `contains`."""
    return callable(getattr(fmt, "contains", None))
