"""Formats in Python: what their classes must do, how they are found, and what is refused."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from quantexp.errors import FormatError
from quantexp.formats import get_format, quantise, resolve, saturated, scales_of
from quantexp.formats.definitions.python import (
    instance_of,
    python_definition,
    source_files,
)
from quantexp.formats.types import Family

SOURCE = """
import torch

class Sign:
    def quantise(self, x, *, axis, generator):
        return x.sign() * x.abs().mean(dim=axis, keepdim=True)

class Silent:
    def quantise(self, x, *, axis, generator):
        return x + torch.rand(x.shape, generator=generator)

class Wider:
    def quantise(self, x, *, axis, generator):
        return x.double()

class InPlace:
    def quantise(self, x, *, axis, generator):
        return x.copy_(x.round())

class Nothing:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module with formats, of its own for each test."""
    name = f"formats_of_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_class_quantises_by_its_name(module: str) -> None:
    x = torch.tensor([[1.0, -3.0], [2.0, 2.0]])
    fmt = get_format(f"{module}:Sign")
    assert (fmt.family, fmt.label) == (Family.PYTHON, "Sign")
    assert quantise(x, fmt).tolist() == [[2, -2], [2, 2]]
    assert quantise(x, f"{module}:Sign", axis=0).tolist() == [[1.5, -2.5], [1.5, 2.5]]
    out = torch.empty_like(x)
    assert quantise(x, fmt, out=out) is out
    assert resolve(fmt).has_blocks
    assert not bool(saturated(x, fmt).any())
    scales = scales_of(x, fmt)
    assert isinstance(scales, torch.Tensor)
    assert float(scales) == 1


def test_the_generator_follows_from_seed_and_offset(module: str) -> None:
    x, fmt = torch.zeros(4), f"{module}:Silent"
    first = quantise(x, fmt, seed=1, offset=2)
    assert torch.equal(first, quantise(x, fmt, seed=1, offset=2))
    assert not torch.equal(first, quantise(x, fmt, seed=1, offset=3))


def test_naming_a_class_imports_nothing(module: str) -> None:
    get_format(f"{module}:Sign")
    assert module not in sys.modules


def test_results_that_are_none_are_refused(module: str) -> None:
    x = torch.zeros(2, 3)
    words = r"quantise of the format .*:Wider must return a tensor like x, torch.float32 \(2, 3\) on cpu, got"
    with pytest.raises(FormatError, match=words):
        quantise(x, f"{module}:Wider")
    with pytest.raises(ValueError, match=r":Nothing must have quantise\(x, \*, axis, generator\)"):
        quantise(x, f"{module}:Nothing")
    with pytest.raises(ValueError, match=r"the format .*:Missing cannot be made: module"):
        quantise(x, f"{module}:Missing")


def test_a_format_may_overwrite_what_it_is_given(module: str) -> None:
    """A weight is an operand of other products too."""
    x = torch.tensor([[0.6, 1.2]])
    y = quantise(x, f"{module}:InPlace")
    assert y.tolist() == [[1.0, 1.0]]
    torch.testing.assert_close(x, torch.tensor([[0.6, 1.2]]), rtol=0, atol=0)


def test_modules_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no module no_such_module for the format"):
        get_format("no_such_module:Sign")
    with pytest.raises(ValueError, match="cannot be found"):
        get_format("no.such:Sign")
    with pytest.raises(ValueError, match="has no source file"):
        get_format("itertools:count")


def test_a_module_in_an_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("in_an_archive.py", SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "archive.zip")
    with pytest.raises(FormatError, match="in_an_archive:Sign has no source file"):
        python_definition("in_an_archive:Sign")


def test_another_source_than_the_recorded_one_is_refused(module: str, tmp_path: Path) -> None:
    digest = python_definition(f"{module}:Sign")["source_sha256"]
    (tmp_path / f"{module}.py").write_text(SOURCE + "\n")
    with pytest.raises(ValueError, match="has changed since the run was composed"):
        instance_of(f"{module}:Sign", digest)


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A package with a format, of its own name for each test; every way to write an import occurs."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / f"package_{abs(hash(request.node.nodeid))}"
    files = {
        "__init__.py": "STEP = 1",
        "own.py": "import torch\nfrom . import relative\nfrom .parts import named\n" + SOURCE,
        "relative.py": f"def late():\n    import {folder.name}.absolute as a\n",
        "absolute.py": "from .parts.deep import *\nfrom quantexp.formats import quantise\n",
        "parts/__init__.py": "",
        "parts/named.py": "import json, beside, importlib\n"
        "importlib.import_module('..called', __package__)",
        "parts/starred/__init__.py": "__all__ = ['listed', 'other']",
        "parts/starred/listed.py": "C = 1",
        "called.py": "def late():\n    return __import__('{package}.parts.starred')",
        "parts/deep.py": "from .. import own",
        "unused.py": "A = 1",
        "../beside.py": "B = 1",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("{package}", folder.name))
    return folder


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        *((f"{name}.py", True) for name in ("__init__", "own", "relative", "absolute")),
        *((f"parts/{name}.py", True) for name in ("named", "deep", "__init__", "starred/listed")),
        ("called.py", True),
        ("../beside.py", True),
        ("unused.py", False),
    ],
)
def test_the_digest_covers_what_a_format_imports_from_beside_it(
    package: Path, file: str, counts: bool
) -> None:
    name = f"{package.name}.own:Sign"
    digest = python_definition(name)["source_sha256"]
    path = package / file
    path.write_text(path.read_text() + "\n# changed\n")
    if not counts:
        assert python_definition(name)["source_sha256"] == digest
        return
    with pytest.raises(FormatError, match="has changed since the run was composed"):
        instance_of(name, digest)


def test_an_installed_format_is_its_own_package_alone(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (tmp_path / "beside.py").rename(installed / "beside.py")
    package.rename(installed / package.name)
    monkeypatch.syspath_prepend(installed)
    modules = [each.removeprefix(package.name) for each in source_files(f"{package.name}.own:Sign")]
    parts = [".parts.deep", ".parts.named", ".parts.starred", ".parts.starred.listed"]
    assert modules == [".own", "", ".absolute", ".called", *parts, ".relative"]


def test_the_digest_covers_all_folders_of_a_namespace_package(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "__init__.py").unlink()
    elsewhere = tmp_path / "elsewhere" / package.name / "absolute.py"
    elsewhere.parent.mkdir(parents=True)
    (package / "absolute.py").rename(elsewhere)
    monkeypatch.syspath_prepend(elsewhere.parents[1])
    assert source_files(f"{package.name}.own:Sign")[f"{package.name}.absolute"] == elsewhere


def test_the_digest_of_a_module_that_imports_nothing_beside_it_is_that_of_its_source(
    module: str, tmp_path: Path
) -> None:
    source = (tmp_path / f"{module}.py").read_bytes()
    assert (
        python_definition(f"{module}:Sign")["source_sha256"] == hashlib.sha256(source).hexdigest()
    )


def test_a_source_that_is_no_python_is_refused(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("class Sign\n")
    with pytest.raises(FormatError, match=r"the format .*:Sign cannot be made: "):
        instance_of(f"{module}:Sign", None)
