"""Transformer Engine absent, broken or working: a stand-in package on the path of a separate process."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantexp.training.megatron.without_te import (
    compiling_on_first_call,
    hidden,
    megatron_version,
)

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
def test_a_broken_package_is_hidden_and_a_second_call_says_so(tmp_path: Path, error: str) -> None:
    folder = stand_in(tmp_path, f"raise {error}('libcudnn is missing')")
    assert outcome(folder, PROGRAM + "print(hide_broken_te())") == [
        f"{error}: libcudnn is missing",
        "False",
        "hidden earlier in this process",
    ]


@pytest.mark.slow
def test_megatron_core_imports_with_a_broken_package(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, "raise RuntimeError('no CUDA')")
    program = PROGRAM + "import megatron.core.models.gpt.gpt_model\nprint('imported')"
    assert outcome(folder, program)[-1] == "imported"


PROGRAM_THAT_IMPORTS = """
import sys
from quantexp.training.megatron.without_te import import_megatron
import_megatron()
import quantexp.training.megatron.trainer
print('torch._inductor' in sys.modules)
"""


def test_trainer_loads_no_compiler() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM_THAT_IMPORTS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_functions_are_compiled_once_and_only_if_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, dict[str, bool]]] = []

    def noted(function: object, **options: bool) -> object:
        compiled.append((function.__name__, options))  # type: ignore[attr-defined]
        return function

    monkeypatch.setattr(torch, "compile", noted)
    with compiling_on_first_call():

        @torch.compile
        def double(x: int) -> int:
            return 2 * x

        @torch.compile(dynamic=True)
        def half(x: int) -> int:
            return x // 2

    assert torch.compile is noted  # type: ignore[comparison-overlap]
    assert compiled == []
    assert (double(3), double(4), half(8)) == (6, 8, 4)
    assert compiled == [("double", {}), ("half", {"dynamic": True})]


def test_a_package_is_hidden_until_the_end_of_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seldom.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with hidden("seldom"), pytest.raises(ImportError):
        importlib.import_module("seldom")
    imported = importlib.import_module("seldom")
    with hidden("seldom"):
        assert importlib.import_module("seldom") is imported, "it was imported before"
    monkeypatch.delitem(sys.modules, "seldom")


def test_the_commit_of_the_repository_around_an_environment_is_no_part_of_the_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """README's environment lies in a clone of quantexp."""
    monkeypatch.setattr("megatron.core.__version__", "0.19.2+abc1234")
    assert megatron_version() == "0.19.2"
