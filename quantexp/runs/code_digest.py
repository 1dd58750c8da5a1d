"""The digest of the code that decides a run's numbers: formats, quantisation, model, order of the data, training.

`NUMERICS_VERSION` changes only if its author remembers it; this digest changes whenever the code does. Comments,
docstrings and formatting leave it as it is: Python enters as its syntax tree, C without comments and white space. What
observes or draws a run, prepares data (the run's hash covers their content) or verifies formats is no part of it.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from quantexp.folders import cache_dir, written_beside

#: Folders and files of the package that decide numbers.
DECIDING = (
    "data",
    "extras/bisect/gradient_run.py",
    "extras/evaluate/evaluation_run.py",
    "extras/evaluate/evaluator.py",
    "extras/evaluate/tasks",
    "extras/evaluate/token_measures.py",
    "extras/transformer_engine/rank",
    "extras/transformer_engine/scheme",
    "formats",
    "model",
    "compiled.py",
    "quant",
    "runs/device.py",
    "training/gradients.py",
    "training/megatron",
)
#: The further ones of a run in Megatron-LM's loop.
OF_MEGATRON_LM = ("extras/megatron_lm",)
_NOT_DECIDING = ("data/prepare/", "formats/certificate.py")
_SUFFIXES = (".py", ".c", ".h")
#: Hex digits of a digest.
DIGITS = 16
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Texts and comments.
_C = re.compile(rb'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def code_digest(package: Path | None = None, parts: Sequence[str] = DECIDING) -> str:
    """The digest of the code in `parts` of a package, wherever it lies, under any version of Python.

    Without `package`, of the quantexp that this process imports. A new content takes half a second, a known one 10 ms.
    """
    package = package or Path(__file__).parents[1]
    paths = (path for part in parts for path in (package / part, *(package / part).rglob("*")))
    files = {
        path.relative_to(package).as_posix(): path
        for path in paths
        if path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()
    }
    return _known(
        tuple(
            (name, files[name].read_bytes())
            for name in sorted(files)
            if not name.startswith(_NOT_DECIDING)
        )
    )


@lru_cache(maxsize=8)
def _known(files: tuple[tuple[str, bytes], ...]) -> str:
    """The digest of files from the cache, or computed; without a usable cache it is computed."""
    own = (("", Path(__file__).read_bytes()),)
    record = cache_dir(None) / "code" / _sha256((*own, *files))
    with suppress(OSError, UnicodeDecodeError):
        digest = record.read_text()
        if re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", digest):
            return digest
    meanings = ((name, _meaning(name, content).encode()) for name, content in files)
    digest = _sha256(tuple(meanings))[:DIGITS]
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(record) as part:
            part.write_text(digest)
    return digest


def _sha256(files: Sequence[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _meaning(name: str, content: bytes) -> str:
    if not name.endswith(".py"):
        code = _C.sub(lambda match: match[0] if match[0].startswith(b'"') else b" ", content)
        return repr(code.split())
    try:
        return repr(_tree(ast.parse(content)))
    except (SyntaxError, ValueError):  # it cannot be imported
        return repr(content)


def _tree(node: object) -> object:
    """A syntax tree as lists, without docstrings, positions and empty fields, in which versions differ."""
    if isinstance(node, list):
        return [_tree(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    fields.pop("kind", None)  # of u"text"
    return [
        type(node).__name__,
        *((name, _tree(value)) for name, value in fields.items() if value not in (None, [])),
    ]
