from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.extras.requantise.candidates import candidates, formats_of
from quantexp.extras.requantise.exponent import Point
from quantexp.extras.requantise.passing import FileScores, Work, operands_of, passed, score_file
from quantexp.formats import get_format

from .conftest import Write, attention, linear, normal

WORK = Work(candidates(formats_of(["mxfp4", "hifp8"])), [Point(get_format("mxfp4"), 1)], 1024)


def scored(folder: Path, jobs: int = 1, work: Work = WORK) -> list[FileScores]:
    return list(passed(operands_of(open_capture(folder)), work, jobs))


def test_parallel_jobs_give_the_scores_of_one_job(write: Write) -> None:
    folder = write({**linear(0), **attention(0), **linear(1)})
    num_threads = torch.get_num_threads()
    one, four = scored(folder, 1), scored(folder, 4)
    assert len(one) == 11
    assert [scores.slots for scores in one] == [scores.slots for scores in four]
    assert torch.get_num_threads() == num_threads


def test_every_operand_has_its_slots_and_every_candidate_a_score(write: Write) -> None:
    (weight,) = (
        scores for scores in scored(write(linear())) if scores.entry.metadata["tensor"] == "weight"
    )
    assert [str(one.slot) for one in weight.slots] == ["linear.fprop.w", "linear.dgrad.w"]
    for one in weight.slots:
        assert (len(one.fidelities), len(one.study)) == (len(WORK.candidates), 1)
        assert one.num_elements == 1024


def test_outputs_and_repeated_lines_are_no_work(write: Write) -> None:
    folder = write({**linear(), ("fc1", "output", 0): normal(4, 1, 4)})
    lines = (folder / "manifest.jsonl").read_text()
    weight = next(line for line in lines.splitlines() if '"weight"' in line)
    backward = {**json.loads(weight), "operation": "backward"}
    (folder / "manifest.jsonl").write_text(lines + json.dumps(backward) + "\n")
    files = operands_of(open_capture(folder))
    assert sorted(e.metadata["tensor"] for e in files) == ["grad_output", "input", "weight"]


def damaged(folder: Path, content: bytes | object) -> FileScores:
    """Replace the file of the input and return its scores."""
    (entry,) = open_capture(folder).select(tensor="input")
    if isinstance(content, bytes):
        entry.path.write_bytes(content)
    else:
        torch.save(content, entry.path)
    scores = score_file(entry, WORK)
    assert scores.slots == []
    return scores


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is refused: it is no file of captured values, is damaged"),
        (b"PK\x03\x04 half a file", "is refused: it is no file of captured values, is damaged"),
        ({"metadata": {}}, "holds no tensor; was it captured?"),
        (
            {"tensor": normal(64, 2, 64, seed=99)},
            "holds other values than the manifest's hash says",
        ),
    ],
)
def test_a_file_without_a_captured_tensor_is_named(
    write: Write, content: bytes | object, words: str
) -> None:
    problem = damaged(write(linear()), content).problem
    assert problem is not None
    assert "0_fc1_input.pt" in problem
    assert words in problem


def test_half_a_file_is_named(write: Write) -> None:
    folder = write(linear())
    whole = (folder / "bf16" / "0_fc1_input.pt").read_bytes()
    assert "is damaged" in str(damaged(folder, whole[: len(whole) // 2]).problem)


def test_a_missing_file_is_named(write: Write) -> None:
    folder = write(linear())
    (folder / "bf16" / "0_fc1_input.pt").unlink()
    (missing, *others) = scored(folder)
    assert "0_fc1_input.pt is missing although it is listed" in str(missing.problem)
    assert [other.problem for other in others] == [None, None]


def unhashed(folder: Path, x: torch.Tensor, **more: object) -> Capture:
    """A capture of the input alone, with other values and without a hash in the manifest."""
    (line, *_) = (folder / "manifest.jsonl").read_text().splitlines()
    metadata = {**json.loads(line), "hash": None, **more}
    torch.save({"tensor": x}, folder / metadata["file"])
    (folder / "manifest.jsonl").write_text(json.dumps(metadata) + "\n")
    return open_capture(folder)


def test_whole_numbers_and_another_layout_are_named(write: Write) -> None:
    folder = write(linear())
    (entry,) = unhashed(folder, torch.arange(8).reshape(2, 4))
    assert "holds no floating-point numbers, got torch.int64" in str(
        score_file(entry, WORK).problem
    )
    (entry,) = unhashed(folder, normal(2, 2, 2, 2))
    assert score_file(entry, WORK).problem == (
        "must be [tokens, sequences, width] as captured, got the shape [2, 2, 2, 2]"
    )


def test_an_empty_tensor_is_noted(write: Write) -> None:
    (entry,) = unhashed(write(linear()), torch.zeros(0, 2, 64))
    scores = score_file(entry, WORK)
    assert (scores.problem, scores.slots) == (None, [])
    assert scores.notes == ["L0 fc1 forward input is empty"]


def test_float64_is_scored_as_float32(write: Write) -> None:
    folder = write(linear())
    x = normal(64, 2, 64).float()
    (entry,) = unhashed(folder, x)
    narrow = score_file(entry, WORK).slots
    (entry,) = unhashed(folder, x.double())
    assert score_file(entry, WORK).slots == narrow


def test_only_whole_blocks_of_sampled_rows_are_scored(write: Write) -> None:
    """Blocks along tokens lack rows; blocks along the width are whole, and amax is that of the whole tensor."""
    sample = {"of": "rows", "axis": 0, "indices": [1, 5], "shape": [64, 2, 64]}
    changes = {"sample": sample, "statistics": {"abs_max": 2.0**30}}
    (entry,) = unhashed(write(linear()), normal(2, 2, 64), **changes)
    scores = score_file(entry, WORK)
    assert [str(one.slot) for one in scores.slots] == ["linear.fprop.x"]
    assert scores.notes == [
        "L0 fc1 forward input as linear.wgrad.x: the capture is a sample in which blocks along tokens are not whole"
    ]
    scaled = next(i for i, one in enumerate(WORK.candidates) if one.name == "hifp8 current away")
    assert scores.slots[0].fidelities[scaled].underflow_share > 0.99  # 2^30 times too large a scale


def test_a_file_without_permission_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: CapturedTensor) -> torch.Tensor:
        raise PermissionError(13, "Permission denied")

    folder = write(linear())
    monkeypatch.setattr(CapturedTensor, "torch", refused)
    problems = [str(scores.problem) for scores in scored(folder)]
    assert problems[0] == f"{folder}/bf16/0_fc1_input.pt cannot be read: Permission denied"
    assert len(problems) == 3


def test_an_early_close_begins_no_more_work(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def counted(entry: CapturedTensor, work: Work) -> FileScores:
        begun.append(str(entry.metadata["file"]))
        time.sleep(0.5)  # eleven of these are long, also where this process seldom runs
        return FileScores(entry)

    folder = write({**linear(0), **attention(0), **linear(1)})
    monkeypatch.setattr("quantexp.extras.requantise.passing.score_file", counted)
    results = passed(operands_of(open_capture(folder)), WORK, 1)
    next(results)
    results.close()
    assert len(begun) < 11
    count = len(begun)
    time.sleep(0.1)
    assert len(begun) == count
