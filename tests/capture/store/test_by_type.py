"""The files of all runs in folders of their formats."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from quantexp.capture.reader import open_capture
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.kept import cut_back
from quantexp.capture.store.manifest import MANIFEST, finish_capture
from quantexp.capture.store.metadata import About
from quantexp.config.compose import compose
from quantexp.errors import CaptureError, ConfigError
from quantexp.launch.attempt import set_aside
from quantexp.launch.reuse import covers
from quantexp.runs.paths import RunDir

REST = "_attention_L0_forward_pre_FA_mxfp8_query.pt"
NAMES = [f"mxfp8/20261231_235959_{number:04d}{REST}" for number in (1, 2)]


def capture(folder: Path, value: float) -> None:
    """Two tensors full of a value, of iterations 1 and 2."""
    store = CaptureStore(folder, by_type=True)
    for iteration, name in enumerate(NAMES, 1):
        x = torch.full((4,), value)
        about = {"iteration": iteration, "quant_type": "mxfp8", "shape": [4], "dtype": "float32"}
        store.add(name, x, About.of(about))
    store.flush()
    store.close()
    finish_capture(folder)


def linked(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(REST) for path in folder.glob("mxfp8/*.pt"))


def test_runs_share_the_folders_of_formats_and_keep_their_own_files(tmp_path: Path) -> None:
    """Both runs began in the last second of a year: the later links have the first second of the next."""
    for value, run in enumerate(("one", "two")):
        capture(tmp_path / run, float(value))
        assert (tmp_path / run / NAMES[0]).is_file()
    assert linked(tmp_path) == [
        *("20261231_235959_0001", "20261231_235959_0002"),
        *("20270101_000000_0001", "20270101_000000_0002"),
    ]
    values = [torch.load(path)["tensor"][0].item() for path in sorted(tmp_path.glob("mxfp8/*.pt"))]
    assert values == [0, 0, 1, 1]
    assert len(open_capture(tmp_path)) == 4, "each file once, though it has two names"
    assert len(open_capture(tmp_path / "two")) == 2


def test_links_go_with_the_files_that_a_resumed_run_drops(tmp_path: Path) -> None:
    for run in ("one", "two"):
        capture(tmp_path / run, 1.0)
    cut_back(tmp_path / "two", 1)
    assert linked(tmp_path) == [
        *("20261231_235959_0001", "20261231_235959_0002", "20270101_000000_0001"),
    ]
    (line,) = (tmp_path / "two" / MANIFEST).read_text().splitlines()
    assert json.loads(line)["file"] == NAMES[0]


def test_links_of_an_attempt_that_is_set_aside_are_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "one")
    run.root.mkdir(parents=True)
    for name in ("one", "two"):
        capture(tmp_path / name, 1.0)
    set_aside(run, str(tmp_path))
    assert linked(tmp_path) == ["20270101_000000_0001", "20270101_000000_0002"]
    assert (tmp_path / "one" / "attempts" / "1" / NAMES[0]).is_file()


def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(CaptureError, match="Operation not permitted"):
        capture(tmp_path / "one", 1.0)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["capture=tensors"], "capture.dir=FOLDER; without it the run's tensors/ has such folders"),
        (["capture=tensors", "capture.dir=x", "capture.store=safetensors"], "capture.store=pt"),
        (["capture=stats", "capture.dir=x"], "capture=tensors, which stores values"),
    ],
)
def test_what_has_no_such_files_is_refused(words: list[str], needed: str) -> None:
    with pytest.raises(ConfigError, match=f"^capture.layout=by_type needs {needed}"):
        compose(["training=fast", *words, "capture.layout=by_type"], None, {})


def test_a_capture_without_links_does_not_cover_one_with_them() -> None:
    words = ["training=fast", "capture.dir=x"]
    plain, linked = (
        compose([*words, *more], None, {}).capture for more in ([], ["capture.layout=by_type"])
    )
    assert covers(linked, plain, 8)
    assert covers(linked, linked, 8)
    assert not covers(plain, linked, 8)
