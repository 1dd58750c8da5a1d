"""Files on disk, whatever happens to the process that writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from quantexp.capture import open_capture
from quantexp.capture.store.deferred import Deferred, deferred
from quantexp.capture.store.files import Values
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import finish_capture
from quantexp.capture.store.metadata import About
from quantexp.schema import StoreKind

#: Imports torch once, then forks writers and kills each at a random moment of its work.
KILLER = """\
import os, random, signal, sys, time
from collections.abc import Sequence
from pathlib import Path
import torch
from quantexp.capture.store.metadata import About
from quantexp.capture.store.folder import CaptureStore
from quantexp.schema import StoreKind

def write(folder, in_pages):
    kind = StoreKind[sys.argv[2]]
    store = CaptureStore(folder, queue_bytes=1 << 20, kind=kind)
    for i in range(10**9):
        x = torch.full((64, 256 * (1 + i % 7) if in_pages else 1 + i % 97), float(i))
        store.add(f"bf16/{i}.pt", x, About.of({"i": i, "shape": list(x.shape), "dtype": "float32"}))

generator = random.Random(0)
for turn in range(25):
    child = os.fork()
    if not child:
        write(Path(sys.argv[1]) / str(turn), turn % 2 == 0)
    # The first five are killed at any moment from their start on, the others once they have listed something: the
    # thread that writes gives way to others, and on a busy machine its start can take longer than any fixed time.
    manifest = Path(sys.argv[1]) / str(turn) / "manifest.jsonl"
    while turn >= 5 and (not manifest.exists() or manifest.read_bytes().count(b"\\n") < 2):
        time.sleep(0.001)
    time.sleep(generator.uniform(0.005, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", StoreKind)
def test_a_kill_at_any_moment_leaves_only_whole_tensors_in_the_manifest(
    tmp_path: Path, kind: StoreKind
) -> None:
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path), kind.value], check=True)
    folders = [tmp_path / str(turn) for turn in range(25)]
    listed = [_check_whole(folder) for folder in folders]
    assert sum(listed) > 25
    for folder in folders:
        _check_each_file(folder)
        finish_capture(folder)
    assert [_check_whole(folder) for folder in folders] == listed
    assert sum(_check_each_file(folder) for folder in folders) >= sum(listed)


def _check_whole(folder: Path) -> int:
    """Check every tensor that the manifest names."""
    manifest = folder / "manifest.jsonl"
    text = manifest.read_text() if manifest.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for entry, line in zip(open_capture(folder) if lines else (), lines, strict=True):
        raw = entry.torch().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert "xxh3_128:" + xxhash.xxh3_128_hexdigest(raw) == line["hash"]
        assert bool((entry.torch() == line["i"]).all())
    return len(lines)


def _check_each_file(folder: Path) -> int:
    """Check that every file is whole, listed or not, and return the number of tensors."""
    num_tensors = 0
    for file in folder.rglob("*.pt"):
        content = torch.load(file, weights_only=True)
        assert bool((content["tensor"] == content["metadata"]["i"]).all())
        num_tensors += 1
    for file in folder.rglob("*.safetensors"):
        for key, x in safetensors.torch.load_file(file).items():
            assert bool((x == int(key.removeprefix("bf16/"))).all())
            num_tensors += 1
    return num_tensors


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize(
    "x",
    [torch.empty(0), torch.empty(3, 0, 2), torch.full((3, 2), float("nan")), torch.tensor(1.5)],
    ids=["empty", "zero-size", "nan", "scalar"],
)
def test_odd_tensors_are_stored_bit_for_bit(
    tmp_path: Path, x: torch.Tensor, kind: StoreKind
) -> None:
    store = CaptureStore(tmp_path, kind=kind)
    store.add("bf16/a.pt", x, About.of({"shape": list(x.shape), "dtype": "float32"}))
    store.flush()
    (entry,) = open_capture(tmp_path)
    loaded = entry.torch()
    assert loaded.shape == x.shape
    assert torch.equal(loaded.nan_to_num(7.0), x.nan_to_num(7.0))
    store.close()


@pytest.mark.parametrize("kind", StoreKind)
def test_values_are_those_of_the_moment_of_capture(tmp_path: Path, kind: StoreKind) -> None:
    store, x = CaptureStore(tmp_path, kind=kind), torch.zeros(1000)
    for i in range(20):
        x.fill_(i)
        store.add(f"bf16/{i}.pt", x, About.of({"shape": [1000], "dtype": "float32"}))
    store.close()
    values = [entry.torch().unique().tolist() for entry in open_capture(tmp_path)]
    assert values == [[i] for i in range(20)]


@pytest.mark.parametrize("kind", StoreKind)
def test_each_tensor_has_its_line_and_its_statistics(tmp_path: Path, kind: StoreKind) -> None:
    store = CaptureStore(tmp_path, kind=kind)
    for i in range(40):
        x = torch.arange(i * 1000, dtype=torch.float32)
        about = About.of({"shape": [1000 * i], "dtype": "float32", "statistics": deferred(x)})
        store.add(f"bf16/{i}.pt", x, about)
        store.add_statistics(about)
        x.zero_()
    assert store.last is not None
    store.refer(store.last, about.with_more(again=True))
    store.leave_out(About.of({"left_out": "why", "statistics": deferred(torch.ones(5))}))
    store.close()
    listed, statistics = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("manifest.jsonl", "statistics.jsonl")
    )
    assert [line["statistics"]["count"] for line in listed] == [*range(0, 40_000, 1000), 39_000, 5]
    assert [line["statistics"] for line in statistics] == [
        line["statistics"] for line in listed[:40]
    ]
    assert statistics[2]["statistics"]["max"] == 1999.0


@pytest.mark.parametrize("kind", StoreKind)
def test_files_of_others_are_left_alone(tmp_path: Path, kind: StoreKind) -> None:
    (tmp_path / "shards").mkdir()
    others = [tmp_path / name for name in ("notes.txt", "other.part", "shards/x.safetensors.part")]
    for other in others:
        other.write_text("mine")
    store = CaptureStore(tmp_path, kind=kind)
    store.add("bf16/a.pt", torch.zeros(3), About.of({"shape": [3], "dtype": "float32"}))
    store.close()
    finish_capture(tmp_path)
    assert [other.read_text() for other in others] == ["mine"] * 3


def _noted(store: CaptureStore, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the values of each batch, as they are written."""
    batches, write = list[list[str]](), store._files.write

    def noted(batch: Sequence[Values]) -> None:
        if batch:
            batches.append([one.name for one in batch])
        write(batch)

    monkeypatch.setattr(store._files, "write", noted)
    return batches


@pytest.mark.parametrize("kind", StoreKind)
def test_pending_tensors_are_written_in_batches_or_when_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: StoreKind
) -> None:
    store = CaptureStore(tmp_path, queue_bytes=8000, kind=kind)
    batches = _noted(store, monkeypatch)
    about = {"shape": [100], "dtype": "float32"}
    for name in "abc":  # 400 bytes each: with an eighth of the queue it is enough
        store.add(f"bf16/{name}.pt", torch.ones(100), About.of(dict(about)))
    assert store.queue.num_bytes <= 1200
    store.queue.flush()
    assert batches == [["bf16/a.pt", "bf16/b.pt", "bf16/c.pt"]]
    store.add("bf16/d.pt", torch.ones(100), About.of(dict(about)))
    assert store.last is not None
    store.refer(store.last, About.of({**about, "again": True}))
    store.leave_out(About.of({**about, "left_out": "why"}))
    store.queue.flush()
    assert len(batches) == 1
    assert store.queue.num_bytes == 400, "counted while it waits"
    store.send()
    store.queue.flush()
    assert batches[1:] == [["bf16/d.pt"]]
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert lines[4] == {**lines[3], "again": True}
    assert (lines[5]["left_out"], lines[5]["file"]) == ("why", None)
    store.close()


def test_a_pending_batch_makes_room_for_a_large_tensor(tmp_path: Path) -> None:
    """An unsent batch blocks neither values nor pending tensors of nearly the queue's size."""
    store = CaptureStore(tmp_path, queue_bytes=1 << 20)
    small, large = torch.ones(1000), torch.ones(261_500)
    store.add("bf16/0.pt", small, About.of({"shape": [1000], "dtype": "float32"}))
    store.add("bf16/1.pt", large, About.of({"shape": [261_500], "dtype": "float32"}))
    store.add("bf16/2.pt", small, About.of({"shape": [1000], "dtype": "float32"}))
    store.add_statistics(About.of({"statistics": Deferred(large)}))
    store.flush()
    assert store.queue.peak_bytes <= 1 << 20
    assert len(open_capture(tmp_path)) == 3
    store.close()
