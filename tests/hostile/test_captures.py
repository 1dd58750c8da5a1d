"""Damage to captures: `captures --check` finds all of it, in every file; readers end with one line and never crash."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.check.folder import check
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind
from tests.hostile.captured import write_capture
from tests.hostile.damage import ANY, lines_moved

LISTS = ("manifest.jsonl", "statistics.jsonl")


@pytest.fixture(
    scope="module", params=[*((kind, False) for kind in StoreKind), (StoreKind.pt, True)]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture") / "tensors"
    kind, divided = request.param
    write_capture(folder, kind, divided=divided)
    assert not check(folder, is_complete=True, num_ranks=2).problems
    return folder


@contextlib.contextmanager
def damaged(whole: Path, source: random.Random) -> Iterator[str]:
    """One file of the capture is damaged, a list in half of the cases; yields what, or "" where no content changed."""
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    lists = [whole / name for name in LISTS]
    file = source.choice(lists if source.random() < 0.5 else files)
    before = file.read_bytes()
    what = source.choice((*ANY, lines_moved) if file in lists else ANY)(source, file)
    try:
        yield what if what is not None and is_changed(file, before) else ""
    finally:
        file.write_bytes(before)


def is_changed(file: Path, before: bytes) -> bool:
    """Whether the content of a file differs, not only what its form has besides: zip's padding, blanks of JSON.

    The folder's path in report.json is not checked either: a folder may move.
    """
    if not file.exists():
        return True
    after = file.read_bytes()
    if file.suffix == ".jsonl" or after == before:
        return after != before
    original = file.with_name("original")
    original.write_bytes(before)
    try:
        if file.suffix == ".json":
            one, other = (json.loads(each) for each in (before, after))
            return {**one, "folder": ""} != {**other, "folder": ""}
        if file.suffix == ".pt":
            one, other = (torch.load(each, weights_only=True) for each in (original, file))
            return not (torch.equal(one.pop("tensor"), other.pop("tensor")) and one == other)
    except Exception:  # noqa: BLE001  (an unpickler may raise anything)
        return True
    finally:
        original.unlink()
    return True


def test_every_damage_of_any_file_is_found(whole: Path, cases: Iterator[random.Random]) -> None:
    missed = []
    for source in cases:
        with damaged(whole, source) as what:
            if what and not check(whole, is_complete=True, num_ranks=2).problems:
                missed.append(what)
    assert not missed


def test_readers_give_the_written_values_or_one_line(
    whole: Path, cases: Iterator[random.Random]
) -> None:
    def values() -> dict[str, list[float]]:
        return {
            entry.name: entry.verified().view(-1).tolist()
            for entry in open_capture(whole).with_values()
        }

    original = values()
    for source in cases:
        with damaged(whole, source):
            try:
                read = values()
            except CaptureError as error:
                assert "\n" not in str(error)  # noqa: PT017
                continue
            assert all(read[name] == original[name] for name in read.keys() & original.keys())


def test_a_capture_that_is_being_written_is_not_damaged(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    """Its lists end anywhere, and files are ahead of them."""
    write_capture(tmp_path, StoreKind.pt, end=False)
    (tmp_path / "mxfp8" / "x.pt.part").write_bytes(b"begun")
    content = {file: file.read_bytes() for file in tmp_path.glob("*.jsonl")}
    for source in cases:
        for file, text in content.items():
            file.write_bytes(text[: source.randrange(len(text) + 1)])
        if any(file.stat().st_size for file in content):
            checked = check(tmp_path, is_live=True, num_ranks=2)
            assert not checked.problems
            assert checked.summary().endswith("; still being written")
