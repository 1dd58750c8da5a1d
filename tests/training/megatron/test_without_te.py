"""Transformer Engine absent, broken or working: a stand-in package on the path of a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from quantexp.training.megatron.without_te import hide_broken_te
why = hide_broken_te()
print(why)
print("transformer_engine" in sys.modules and sys.modules["transformer_engine"] is not None)
"""


def outcome(path: Path, program: str = PROGRAM) -> list[str]:
    process = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(path), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return process.stdout.splitlines()


def stand_in(folder: Path, content: str) -> Path:
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(content)
    return folder


def test_an_absent_package_changes_nothing(tmp_path: Path) -> None:
    assert outcome(tmp_path) == ["None", "False"]


def test_a_working_package_is_kept(tmp_path: Path) -> None:
    assert outcome(stand_in(tmp_path, "")) == ["None", "True"]


@pytest.mark.parametrize("error", ["RuntimeError", "OSError"])
def test_a_broken_package_is_hidden(tmp_path: Path, error: str) -> None:
    folder = stand_in(tmp_path, f"raise {error}('libcudnn is missing')")
    assert outcome(folder) == [f"{error}: libcudnn is missing", "False"]


@pytest.mark.slow
def test_megatron_core_imports_with_a_broken_package(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, "raise RuntimeError('no CUDA')")
    program = PROGRAM + "import megatron.core.models.gpt.gpt_model\nprint('imported')"
    assert outcome(folder, program)[-1] == "imported"


def test_a_second_call_returns_that_it_is_hidden(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, "raise RuntimeError('no CUDA')")
    assert (
        outcome(folder, PROGRAM + "print(hide_broken_te())")[-1] == "hidden earlier in this process"
    )
