"""C compiled on first use: stored, never loaded on another machine, and no error if compiling is impossible."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quantexp import compiled
from quantexp.compiled import address, library


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return 7; }\n")
    library.cache_clear()
    return path


def stored_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/quantexp/compiled").glob("*"))


def test_a_library_is_compiled_once_and_stored(source: Path, tmp_path: Path) -> None:
    handle = library(source, "slower").library
    assert handle is not None
    assert handle.seven() == 7
    (path,) = stored_files(tmp_path)
    mtime_ns = path.stat().st_mtime_ns
    library.cache_clear()
    assert library(source, "slower").library is not None
    assert path.stat().st_mtime_ns == mtime_ns


def test_another_source_processor_or_compiler_is_compiled_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(source, "slower")
    source.write_text("int seven(void) { return 8; }\n")
    library.cache_clear()
    assert library(source, "slower").library.seven() == 8
    monkeypatch.setattr(compiled, "_processor", lambda: "another")
    library.cache_clear()
    library(source, "slower")
    assert len(stored_files(tmp_path)) == 3


def test_simultaneous_compilations_do_not_interfere(source: Path, tmp_path: Path) -> None:
    words = (
        "import sys; from pathlib import Path; from quantexp.compiled import library; "
        "print(library(Path(sys.argv[1]), '').library.seven())"
    )

    def run(_: int) -> str:
        command = [sys.executable, "-c", words, str(source)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == ["7\n"] * 4
    assert len(stored_files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("QUANTEXP_COMPILE", "0", "not compiled, as QUANTEXP_COMPILE=0 says"),
        ("CC", "no-such-compiler", "not compiled: CC=no-such-compiler, which is not there"),
        ("CC", "false", "not compiled: "),
        ("PATH", "", "not compiled: no C compiler (cc, gcc, clang)"),
    ],
)
def test_obstacle_to_compiling_is_reported_once(
    variable: str,
    value: str,
    words: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv(variable, value)
    assert library(source, "slower").library is None
    library(source, "slower")
    message = capsys.readouterr().err
    assert message.startswith(f"seven.c: {words}")
    assert message.count("\n") == 1
    assert message.endswith("; slower\n")


def test_message_of_the_compiler_is_passed_on(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text("not C\n")
    assert library(source, "slower").library is None
    assert "failed: " in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_no_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert library(source, "slower").library is None
    assert "not compiled: " in capsys.readouterr().err


def test_a_damaged_library_is_compiled_again(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = tmp_path / "elsewhere.so"
    monkeypatch.setattr(compiled, "_path", lambda *_: elsewhere)
    elsewhere.write_bytes(b"no library")
    assert library(source, "slower").library.seven() == 7
    assert elsewhere.read_bytes().startswith(b"\x7fELF")
    assert capsys.readouterr().err == ""


def short() -> torch.Tensor:
    x = torch.arange(8.0)
    x.untyped_storage().resize_(8)
    return x


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (
            torch.ones(8, dtype=torch.float64),
            "takes torch.float32 on the CPU, got torch.float64 on cpu",
        ),
        (torch.ones(8, device="meta"), "takes torch.float32 on the CPU, got torch.float32 on meta"),
        (torch.ones(9), r"takes 8 elements in a row, got shape \[9\]"),
        (torch.ones(16)[::2], r"takes 8 elements in a row, got shape \[8\] with strides \(2,\)"),
        (torch.ones(1).expand(8), r"got shape \[8\] with strides \(0,\)"),
        (torch._neg_view(torch.ones(8)), "takes 8 elements in a row"),
        (short(), r"a tensor of shape \[8\] needs 32 bytes, and its storage has 8"),
    ],
)
def test_compiled_code_gets_no_memory_but_that_of_the_elements(x: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        address(x, 8, torch.float32)


def test_elements_in_the_middle_of_a_storage_have_an_address() -> None:
    x = torch.arange(16.0)
    assert address(x[4:12].view(2, 4), 8, torch.float32) == x.data_ptr() + 16
