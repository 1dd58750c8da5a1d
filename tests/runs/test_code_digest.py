"""The digest of the code that decides numbers: what changes it, and what does not."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantexp.runs import code_digest as module
from quantexp.runs.code_digest import OF_MEGATRON_LM, code_digest

PACKAGE = Path(module.__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package."""
    copy = tmp_path / "elsewhere" / "quantexp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_a_copy_has_the_digest_of_the_package(tree: Path) -> None:
    assert code_digest(tree) == code_digest() == code_digest(PACKAGE)
    assert len(code_digest()) == 16


def test_comments_docstrings_and_formatting_do_not_change_it(tree: Path) -> None:
    for file in (tree / "quant").rglob("*.py"):
        syntax = ast.parse(file.read_text())
        if ast.get_docstring(syntax) is not None:
            syntax.body[0] = ast.Expr(ast.Constant("Another docstring."))
        file.write_text(f"# another comment\n{ast.unparse(syntax)}\n\n\n")
    kernel = tree / "formats" / "kernels" / "cpu.c"
    text = kernel.read_text().replace(";\n", ";  // another comment\n", 1)
    kernel.write_text(f"/* another\n comment */\n{text.replace('    ', chr(9))}")
    assert code_digest(tree) == code_digest()


@pytest.mark.parametrize(
    "file",
    [
        "formats/rounding.py",
        "formats/kernels/triton_mx.py",
        "quant/multiply.py",
        "training/megatron/rounded_state.py",
        "extras/evaluate/tasks/model.py",
        "model/decoder.py",
        "data/binary.py",
    ],
)
def test_one_changed_constant_changes_it(tree: Path, file: str) -> None:
    syntax = ast.parse((tree / file).read_text())
    constants = (node for node in ast.walk(syntax) if isinstance(node, ast.Constant))
    next(each for each in constants if type(each.value) is int).value += 1  # type: ignore[operator]
    (tree / file).write_text(ast.unparse(syntax))
    assert code_digest(tree) != code_digest()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("formats/kernels/lanes.h", "0x", "1 + 0x"),
        ("compiled.py", '"-O3"', '"-Ofast"'),
        ("quant/multiply.py", "not ", ""),
    ],
)
def test_one_changed_word_changes_it(tree: Path, file: str, old: str, new: str) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert code_digest(tree) != code_digest()


def test_a_new_file_and_one_that_cannot_be_parsed_change_it(tree: Path) -> None:
    (tree / "quant" / "more.py").write_text("X = 1\n")
    with_more = code_digest(tree)
    (tree / "quant" / "more.py").write_text("X = \n")
    assert len({code_digest(), with_more, code_digest(tree)}) == 3


def test_what_decides_no_number_does_not_change_it(tree: Path) -> None:
    for file in ("training/observer.py", "formats/certificate.py", "data/prepare/run.py"):
        (tree / file).write_text("X = 1\n")
    for new in ("quant/.#linear.py", "quant/notes.md", "formats/kernels/cpu.so"):
        (tree / new).write_text("X = 1\n")
    assert code_digest(tree) == code_digest()


def test_the_code_of_another_loop_counts_only_where_it_is_named(tree: Path) -> None:
    parts = (*module.DECIDING, *OF_MEGATRON_LM)
    before = code_digest(tree, parts)
    (tree / "extras/megatron_lm/spec.py").write_text("X = 1\n")
    assert code_digest(tree) == code_digest() != before
    assert code_digest(tree, parts) != before


def test_texts_in_c_are_no_comments(tmp_path: Path) -> None:
    file = tmp_path / "formats" / "one.c"
    file.parent.mkdir()
    digests = set()
    for text in ('char *a = "//b";', 'char *a = "//c"; // d', 'char *a = "//c"; /* "e */'):
        file.write_text(text)
        digests.add(code_digest(tmp_path))
    assert len(digests) == 2


def test_a_damaged_or_missing_cache_is_replaced_or_done_without(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    module._known.cache_clear()
    expected = code_digest()
    (record,) = (cache / "quantexp" / "code").iterdir()
    assert record.read_text() == expected
    for damaged in ("", "0" * 17, "\udcff" * 16):
        record.write_bytes(damaged.encode("utf-8", "surrogateescape"))
        module._known.cache_clear()
        assert code_digest() == record.read_text() == expected
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    module._known.cache_clear()
    assert code_digest() == expected


def test_it_needs_no_torch_and_is_not_taken_where_nothing_runs(tmp_path: Path) -> None:
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    check = (
        "import sys; from quantexp.runs.code_digest import code_digest; code_digest(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-m", "quantexp", "list"], env=variables, check=True)
    assert not (tmp_path / "quantexp" / "code").exists()
    subprocess.run([sys.executable, "-c", check], env=variables, check=True)
    assert (tmp_path / "quantexp" / "code").exists()
