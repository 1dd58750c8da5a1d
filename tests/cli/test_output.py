"""Folders for figures that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.cli.output import require_folder
from quantexp.errors import RunError
from tests.analysis.compare.runs import Runs

REMEDY = "give another with out=FOLDER"


@pytest.mark.parametrize("out", ["file", "file/below"])
@pytest.mark.parametrize(
    "words", [["compare", "runs"], ["evaluate", "training=fast"], ["bisect", "RUN"]]
)
def test_a_file_in_place_of_the_folder_is_reported_first(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], words: list[str], out: str
) -> None:
    Runs(in_tmp / "runs").add()
    (in_tmp / "file").touch()
    assert main([*words, f"out={out}"]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"quantexp: {out} cannot be written: Not a directory; {REMEDY}\n"
    assert printed.out == ""


def test_a_folder_without_permission_is_refused_and_a_new_one_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "a" / "b"
    require_folder(new)
    assert not new.parent.exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(RunError) as refused:
        require_folder(new)
    assert str(refused.value) == f"{new} cannot be written: Permission denied; {REMEDY}"
