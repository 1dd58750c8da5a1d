"""Where the captured tensors of a folder are."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.capture.reader import place_of_captures


def test_run_with_a_capture_dir_has_its_captures_there(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "m_d_bf16-1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"capture: {{dir: {tmp_path / 'big'}}}\npaths: {{root: {run.parent}}}\n"
    )
    assert place_of_captures(run) == tmp_path / "big" / "m_d_bf16-1"


@pytest.mark.parametrize("config", ["capture: {dir: null}", "capture: 3", "{", "[]", "\0"])
def test_run_without_one_has_them_in_its_own_folder(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert place_of_captures(tmp_path) == tmp_path
    (tmp_path / "tensors").mkdir()
    assert place_of_captures(tmp_path) == tmp_path / "tensors"
    (tmp_path / "manifest.jsonl").touch()
    assert place_of_captures(tmp_path) == tmp_path
