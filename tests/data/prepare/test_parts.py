"""Several tasks make the outputs of some inputs each, and a last process joins them."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quantexp.data.prepare import make, shards
from quantexp.data.prepare.inputs import Input
from quantexp.data.prepare.job import Job, make_job
from quantexp.data.prepare.outputs import Listed, make_output, read_listing, unfinished
from quantexp.data.prepare.partial import partial_folder
from quantexp.data.prepare.run import existing_result, make_part, prepare
from quantexp.errors import DataError

from .made import config, content_of, lines, prepared, rows, texts, write_forms

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setattr(shards, "SHARD_ROWS", 7)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """The same texts in every form, and an empty file."""
    write_forms(tmp_path / "raw", texts(80))
    (tmp_path / "raw" / "empty.jsonl").touch()
    return tmp_path / "raw"


def job_of(source: object, prefix: Path, **changes: Any) -> Job:
    return make_job(config(source, prefix, **changes))


def part(job: Job, among: list[int], patience_s: float = 0.0) -> str:
    """Make a part; returns what is printed."""
    out = StringIO()
    make_part(job, among, Console(file=out, width=300), patience_s)
    return out.getvalue()


def no_reading(item: Input) -> Iterator[Any]:
    raise AssertionError(f"{item.name} is read again")


@pytest.mark.parametrize("deduplicate", [False, True])
def test_parts_give_the_bytes_of_one_process_and_no_input_is_read_twice(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deduplicate: bool
) -> None:
    alone = prepared(raw, tmp_path / "alone" / "x", deduplicate=deduplicate).prefix
    job = job_of(raw, tmp_path / "own" / "x", deduplicate=deduplicate)
    indices = list(range(len(job.inputs)))
    for group in (indices[1::2], indices[::2]):
        assert f"{len(group)} of {len(indices)} inputs: " in part(job, group)
    assert unfinished(partial_folder(job), indices) == []
    monkeypatch.setattr(make, "read_shards", no_reading)
    assert content_of(prepare(job, QUIET).prefix) == content_of(alone)


def test_join_makes_what_is_missing_or_damaged(raw: Path, tmp_path: Path) -> None:
    job = job_of(raw, tmp_path / "own" / "x")
    folder = partial_folder(job)
    part(job, list(range(1, len(job.inputs))))
    assert unfinished(folder, range(len(job.inputs))) == [0]
    listed = read_listing(folder, 3)
    assert listed is not None
    (folder.outputs / listed[1].name).write_bytes(b"damaged")
    (folder.outputs / listed[-1].name).unlink()
    folder.listing(4).write_text("damaged")
    prepare(job, QUIET)
    alone = prepared(raw, tmp_path / "alone" / "x").prefix
    assert content_of(job.prefix) == content_of(alone)


def test_part_continues_from_its_outputs(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, made = job_of(raw, tmp_path / "own" / "x"), list[str]()

    def interrupted(shard: Any, path: Path, *arguments: Any) -> Any:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(path.name)
        return make_output(shard, path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(make, "make_output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            part(job, [2])
    assert read_listing(partial_folder(job), 2) is None
    assert part(job, [1]).startswith("1 of "), "another part has nothing to resume"
    before = [(partial_folder(job).outputs / name).stat().st_ino for name in made]
    assert part(job, [2]).startswith(f"resuming: {partial_folder(job).root}\n")
    assert [(partial_folder(job).outputs / name).stat().st_ino for name in made] == before
    listed = read_listing(partial_folder(job), 2)
    assert listed is not None
    assert [output.name for output in listed][:2] == made
    assert listed[-1] == Listed(listed[-1].name, job.inputs[2].num_bytes)


def test_parts_share_the_folder_and_exclude_every_other_preparation(
    raw: Path, tmp_path: Path
) -> None:
    job = job_of(raw, tmp_path / "own")
    with partial_folder(job).shared():
        part(job, [0])
        with pytest.raises(DataError, match=r"own\.partial: another process prepares there"):
            prepare(job, QUIET)
    with (
        partial_folder(job).alone(),
        pytest.raises(DataError, match=r"own\.partial: another process prepares there"),
    ):
        part(job, [1])


def test_a_task_waits_for_the_submitter_to_leave_the_folder(raw: Path, tmp_path: Path) -> None:
    job = job_of(raw, tmp_path / "own")
    with partial_folder_locked(job) as lock:
        threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        part(job, [0], patience_s=120)
    with partial_folder_locked(job):
        begin = time.monotonic()
        with pytest.raises(DataError, match="another process prepares there"):
            part(job, [0], patience_s=0.3)
        assert time.monotonic() - begin >= 0.3


class partial_folder_locked:  # noqa: N801
    """The lock as another process holds it."""

    def __init__(self, job: Job) -> None:
        folder = partial_folder(job)
        folder.root.mkdir(exist_ok=True)
        self.descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def __enter__(self) -> int:
        return self.descriptor

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)


def broken(number: int, total: int, seed: int) -> bytes:
    """JSON lines, and among them some that are none."""
    good = lines(rows(texts(total, seed=seed))).splitlines(keepends=True)
    for index in range(number):
        good.insert(1 + index * total // number, b"no JSON\n")
    return b"".join(good)


@pytest.mark.parametrize(
    "numbers", [(3, 4, 5), (0, 30, 1), (11, 0, 30)], ids=["together", "second", "first"]
)
def test_too_many_rejected_records_end_the_join_as_they_end_one_process(
    tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    (tmp_path / "raw").mkdir()
    for index, number in enumerate(numbers):
        content = broken(number, 100, index) if number else lines(rows(texts(100, seed=index)))
        (tmp_path / "raw" / f"{index}.jsonl").write_bytes(content)
    with pytest.raises(DataError) as alone:
        prepared(tmp_path / "raw", tmp_path / "x", max_rejected=10)
    listed = (tmp_path / "x.partial" / "too_many_rejected.jsonl").read_text()
    (tmp_path / "x.partial").rename(tmp_path / "alone.partial")
    job = job_of(tmp_path / "raw", tmp_path / "x", max_rejected=10)
    for index, number in enumerate(numbers):
        words = "more than dataset.prepare.max_rejected: stopped; the last job fails with the list"
        assert (words in part(job, [index])) == (number > 10)
    with pytest.raises(DataError) as joined:
        prepare(job, QUIET)
    assert str(joined.value) == str(alone.value)
    assert "records cannot be read, more than dataset.prepare.max_rejected=10" in str(alone.value)
    assert (tmp_path / "x.partial" / "too_many_rejected.jsonl").read_text() == listed
    raised = job_of(tmp_path / "raw", tmp_path / "x", max_rejected=100)
    assert prepare(raised, QUIET).card.report["num_rejected"] == sum(numbers)


def test_part_of_a_complete_preparation_has_nothing_to_do(raw: Path, tmp_path: Path) -> None:
    job = job_of(raw, tmp_path / "own")
    prepare(job, QUIET)
    assert part(job, [0]) == f"{job.prefix} is prepared already\n"
    assert not partial_folder(job).root.exists()
    result = existing_result(job, force=False)
    assert result is not None
    assert result.existed


def test_part_leaves_a_result_that_is_being_moved_alone(raw: Path, tmp_path: Path) -> None:
    job = job_of(raw, tmp_path / "own")
    done = prepare(job, QUIET)
    folder = partial_folder(job)
    folder.root.mkdir()
    for path in done.prefix.parent.glob("own.*"):
        if path.is_file():
            path.rename(Path(f"{folder.result}{path.suffix}"))
    assert part(job, [0]) == ""
    assert not list(folder.outputs.iterdir())
    assert content_of(prepare(job, QUIET).prefix)


def test_known_inputs_are_not_searched_again(raw: Path, tmp_path: Path) -> None:
    before = job_of(raw, tmp_path / "own")
    (raw / "later.jsonl").write_bytes(lines(rows(texts(3))))
    again = make_job(config(raw, tmp_path / "own"), before.inputs)
    assert (again.inputs, again.hash) == (before.inputs, before.hash)
    Path(before.inputs[0].name).unlink()
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory"):
        make_job(config(raw, tmp_path / "own"), before.inputs)


def test_dataset_of_the_hub_is_one_input_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    def load_dataset(name: str, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        loads.append(name)
        return rows(texts(20, seed=len(name)), name)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = ["hf:a/one", "hf:a/three"]
    names = [word.removeprefix("hf:") for word in source]
    configured = config("x", tmp_path / "own" / "x")
    configured.source = source
    job = make_job(configured)
    part(job, [1])
    part(job, [0])
    assert loads == names[::-1]
    own = prepare(job, QUIET).prefix
    assert loads == names[::-1], "the join needs no network"
    configured.path = str(tmp_path / "alone" / "x")
    alone_prefix = prepare(make_job(configured), QUIET).prefix
    assert content_of(own) == content_of(alone_prefix)


def test_outputs_of_two_processes_for_one_shard_do_not_meet(raw: Path, tmp_path: Path) -> None:
    """A lost node may still work on a shard that the requeued task makes again."""
    job = job_of(raw, tmp_path / "own")
    part(job, [2])
    folder = partial_folder(job)
    names = {path.name for path in folder.outputs.iterdir()}
    (folder.outputs / f"{next(iter(names))}.n9-1.unfinished").write_bytes(b"half")
    prepare(job, QUIET)
    assert not folder.root.exists()


def test_listing_is_json_of_names_and_bytes(raw: Path, tmp_path: Path) -> None:
    job = job_of(raw, tmp_path / "own")
    part(job, [2])
    content = json.loads(partial_folder(job).listing(2).read_text())
    assert content[0].keys() == {"name", "num_read"}
    assert content[0]["name"].startswith("00002-0000000000000-")
