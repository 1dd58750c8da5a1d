"""Formats that are Python classes of the user: `my_package.my_module:MyFormat`.

    class MyFormat:
        def quantise(self, x: Tensor, *, axis: int, generator: torch.Generator) -> Tensor: ...

`quantise` returns values in x's shape and dtype; `generator` lies on x's device and is seeded from the run's seed, the
slot, the iteration and the micro-batch, so that a run repeats its numbers, and so that the proof of engagement can call
the class again and compare.

Only a module that a configuration names is imported, and only by what quantises. A run records the digest of its source
and of the modules that it imports from its own package, and their texts, and stops if one of them is another.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quantexp.errors import FormatError
from quantexp.formats.types import Element, Family, Format, Rounding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The keys of a definition.
PYTHON, DIGEST = "python", "source_sha256"
#: Folders of installed packages, which lie beside packages that have nothing to do with them.
_INSTALLED = ("site-packages", "dist-packages")
#: quantexp's own code, where it lies in the same folder: a run's identity has its digest.
_OURS = "quantexp"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
#: What is known of its values: nothing, so that a plan counts those of the working precision.
_UNKNOWN = Element("python", 16, emin=-126, emax=127, mantissa_bits=7, max=float("inf"))


class PythonFormat(Protocol):
    """What a class must have."""

    def quantise(self, x: Tensor, *, axis: int, generator: torch.Generator) -> Tensor:
        """The values of x in the format, in x's shape and dtype."""


def is_python(name: str) -> bool:
    """Whether a name is one of a Python class."""
    return _NAME.fullmatch(name) is not None


def python_definition(name: str) -> dict[str, str]:
    """The definition of a Python format: its name, and the digest of `source_files`.

    Raises:
        FormatError: there is no such module, or it has no source.
    """
    first, *others = ((module, file.read_bytes()) for module, file in source_files(name).items())
    digest = hashlib.sha256(first[1])
    for module, content in others:
        digest.update(f"\0{module}\0{len(content)}\0".encode() + content)
    return {PYTHON: name, DIGEST: digest.hexdigest()}


def source_files(name: str) -> dict[str, Path]:
    """The files that define a format, by their modules: its own, and those that it imports from beside it, in order.

    Beside it is its own package, with all folders of a namespace package; if that is not installed, the folder that the
    package or the module lies in, too. Imports are followed as they are written, also in functions and by
    `import_module`; one by a computed name is not seen. Empty files are left out.

    Raises:
        FormatError: there is no such module, or it has no source.
    """
    own, file = name.partition(":")[0], source_file(name)
    is_package = file.name == "__init__.py"
    root = file.parents[own.count(".") + is_package]
    above = own.partition(".")[0]
    top = above if root.name in _INSTALLED else None
    portions = getattr(sys.modules.get(above), "__path__", ()) if own != above else ()
    roots = dict.fromkeys((root, *(Path(portion).parent for portion in portions)))
    files, waiting = {own: file}, [own]
    while waiting:
        module = waiting.pop()
        for each in _imports(module, files[module]):
            first = each.partition(".")[0]
            other = _file_in(roots if first == above else [root], each)
            is_beside = top in (None, first) and first != _OURS
            if other is not None and is_beside and each not in files:
                files[each] = other
                waiting.append(each)
    others = sorted(each for each in files if each != own and files[each].stat().st_size)
    return {each: files[each] for each in (own, *others)}


def _imports(module: str, file: Path) -> set[str]:
    """The modules that a file imports, with the packages that they lie in and its own; some may be other objects."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = {package}
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # not Python: reported when it is imported; or an extension
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            names |= {base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)}
        elif isinstance(node, ast.Call) and (name := _loaded_by_name(node)):
            names.add(_absolute(name, package))
        elif isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            listed = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            names |= {_absolute(f".{name!s}", module) for name in listed if module == package}
    parts = [name.split(".") for name in names if name]
    return {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}


def _absolute(name: str, package: str) -> str:
    """A module's name in full, from one that may begin with dots, as in the files of a package."""
    relative = name.lstrip(".")
    num_dots = len(name) - len(relative)
    above = package.split(".")[: len(package.split(".")) + 1 - num_dots] if num_dots else []
    return ".".join(filter(None, [*above, relative]))


def _loaded_by_name(node: ast.Call) -> str | None:
    """The literal name in `import_module(NAME)` or `__import__(NAME)`; None for every other call."""
    called = getattr(node.func, "attr", getattr(node.func, "id", None))
    name = node.args[0] if node.args else None
    if called not in ("import_module", "__import__") or not isinstance(name, ast.Constant):
        return None
    return name.value if isinstance(name.value, str) else None


def _file_in(roots: Iterable[Path], module: str) -> Path | None:
    """The file of a module in one of these folders, source or extension; None if it lies in none of them."""
    places = [root.joinpath(*module.split(".")) for root in roots]
    suffixes = ("/__init__.py", *SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
    files = (Path(f"{place}{suffix}") for place in places for suffix in suffixes)
    return next((file for file in files if file.is_file()), None)


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
    if not spec.origin or not spec.origin.endswith(".py") or not Path(spec.origin).is_file():
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
            f"the format {name} must have quantise(x, *, axis, generator), see docs/own_format.md"
        )
    result: PythonFormat = instance
    return result
