"""The image shares no arithmetic with the code that quantises."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quantexp.formats
import quantexp.proof.arithmetic
from quantexp.formats import (
    Hadamard,
    QuantSpec,
    quantising,
)
from quantexp.proof import image as image_module
from quantexp.proof.image import image, num_differing, own_amax
from tests.formats.tensors import assert_same

from .image_cases import (
    formats,
    normal,
    options_of,
    specs_of,
)

#: What describes formats.
SHARED = {
    "quantexp.formats.definitions.python",
    "quantexp.formats.spec",
    "quantexp.formats.table",
    "quantexp.formats.types",
}


#: The processor's mode: functions of `quantexp.formats.kernels`.
MODE = {
    "exact",
    "exact_in_pool",
    "is_flushing",
    "_exact_pool",
    "_refuse_flushing_pool",
    "_use_one_thread",
}


def modules_of_the_image() -> list[Path]:
    folder = Path(quantexp.proof.arithmetic.__file__).parent
    return [Path(image_module.__file__), *sorted(folder.glob("*.py"))]


@pytest.mark.parametrize("file", modules_of_the_image(), ids=lambda file: file.name)
def test_it_imports_no_arithmetic_of_formats(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "names")]
    for node in imports:
        name = getattr(node, "module", None) or node.names[0].name
        if name.startswith("quantexp."):
            others = ("quantexp.proof.arithmetic", "quantexp.compiled")
            is_mode = name == "quantexp.formats.kernels" and {a.name for a in node.names} <= MODE
            assert is_mode or name in SHARED or name.startswith(others), name


def planted_everywhere() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Every function of `quantexp.formats` and `quantexp.quant` that may compute, wherever it is imported."""
    names = []
    for package in ("quantexp.formats", "quantexp.quant"):
        names.append(package)
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            if "verify" not in info.name and "triton" not in info.name:
                names.append(info.name)
    # All are imported before the first is planted.
    for module in [importlib.import_module(name) for name in names]:
        for attribute, value in list(vars(module).items()):
            home = getattr(value, "__module__", "")
            is_ours = home.startswith(("quantexp.formats.", "quantexp.quant."))
            is_mode = home == "quantexp.formats.kernels" and attribute in MODE
            if inspect.isfunction(value) and is_ours and not is_mode and not _is_shared(home):
                yield module, attribute, value


def _is_shared(module: str) -> bool:
    return module in SHARED or module.startswith("quantexp.formats.definitions")


def test_a_fault_in_any_function_that_quantises_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = normal((33, 150), 11).bfloat16()
    cases: list[tuple[QuantSpec, dict[str, Any]]] = []
    for fmt in formats().values():
        specs = specs_of(fmt)
        for plain in specs[:: max(1, len(specs) // 3)]:
            options = options_of(plain, x)
            changed = replace(plain, hadamard=Hadamard.DETERMINISTIC, hadamard_block=16)
            cases += [(plain, options), (changed, options)]
    before = [image(x, spec, -1, **options) for spec, options in cases]

    def planted(*_: object, **__: object) -> Any:
        raise AssertionError("arithmetic of the code that quantises")

    num_planted = 0
    for module, attribute, _ in planted_everywhere():
        monkeypatch.setattr(module, attribute, planted)
        num_planted += 1
    assert num_planted > 300
    with pytest.raises(AssertionError, match="arithmetic of the code"):
        quantising.quantise(x, cases[0][0])
    for (spec, options), expected in zip(cases, before, strict=True):
        assert_same(image(x, spec, -1, **options), expected)
        assert num_differing(expected, x, spec, -1, **options) == 0
        own_amax(x, spec, -1)
