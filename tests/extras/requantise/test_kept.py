from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quantexp.capture.reader import Capture
from quantexp.extras.requantise import kept as kept_scores
from quantexp.extras.requantise.arguments import Request
from quantexp.extras.requantise.kept import KeptScores
from quantexp.extras.requantise.passing import FileScores, Work, score_file
from quantexp.extras.requantise.requantising import files_of, work_on

from .conftest import Write, normal


@pytest.fixture
def kept(tmp_path: Path) -> KeptScores:
    (tmp_path / "kept").mkdir()
    return KeptScores(tmp_path / "kept")


@pytest.fixture
def files(write: Write) -> Capture:
    """Zeros have no SQNR and ones an infinite one; an empty tensor has a note alone."""
    tensors = {
        ("fc1", "input", 0): normal(64, 2, 32),
        ("fc1", "input", 1): torch.zeros(64, 2, 32),
        ("fc1", "input", 2): torch.ones(64, 2, 32),
        ("fc1", "input", 3): torch.empty(0, 2, 32),
    }
    return files_of(Request(str(write(tensors)), []))


WORK: Work = work_on(Request("", [], formats="mxfp4", num_elements=256))


def scores_of(kept: KeptScores, files: Capture) -> list[str]:
    """The scores; repr, because NaN differs from itself."""
    return [repr(kept.score(entry, WORK)) for entry in files]


def refuse(*arguments: object) -> FileScores:
    raise AssertionError("it is scored again")


def test_scores_are_kept_to_the_last_bit(
    kept: KeptScores, files: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept.missing(list(files)) == [0, 1, 2, 3]
    expected = [repr(score_file(entry, WORK)) for entry in files]
    assert "sqnr_db=nan" in expected[1]
    assert "sqnr_db=inf" in expected[2]
    assert "is empty" in expected[3]
    assert scores_of(kept, files) == expected
    assert kept.missing(list(files)) == []
    monkeypatch.setattr(kept_scores, "score_file", refuse)
    assert scores_of(kept, files) == expected


def test_scores_of_another_file_are_computed_again(
    kept: KeptScores, files: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_of(kept, files)
    os.utime(files[0].path, ns=(1, 1))
    monkeypatch.setattr(kept_scores, "score_file", refuse)
    with pytest.raises(AssertionError, match="scored again"):
        kept.score(files[0], WORK)
    kept.score(files[1], WORK)


@pytest.mark.parametrize("content", [b"", b"damaged", b"PK\x03\x04"])
def test_damaged_scores_are_computed_again(
    kept: KeptScores, files: Capture, content: bytes
) -> None:
    expected = scores_of(kept, files)
    for file in kept.folder.iterdir():
        file.write_bytes(content)
    assert scores_of(kept, files) == expected


def test_a_tensor_that_cannot_be_read_keeps_nothing(kept: KeptScores, files: Capture) -> None:
    files[0].path.write_bytes(b"damaged")
    assert kept.score(files[0], WORK).problem is not None
    assert kept.missing(list(files)) == [0, 1, 2, 3]
