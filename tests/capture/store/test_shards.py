"""Shards: read by the safetensors library, whatever they hold and however their writing ended."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from quantexp.capture import open_capture
from quantexp.capture.store import shards
from quantexp.capture.store.ending import finish_capture
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About
from quantexp.capture.store.sealing import HEADER_BYTES, INDEX
from quantexp.capture.store.shards import ShardFiles
from quantexp.cli.main import main
from quantexp.errors import CaptureError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import StoreKind

RunTiny = Callable[..., RunDir]


def add(store: CaptureStore, name: str, x: torch.Tensor, **more: object) -> None:
    dtype = str(x.dtype).removeprefix("torch.")
    metadata = {"tensor": name, "layer": 0, "module": "fc1", "operation": "forward"}
    store.add(
        f"bf16/{name}.pt", x, About.of({**metadata, "shape": list(x.shape), "dtype": dtype, **more})
    )


def kept(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library reads, by the index."""
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for key, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            found[key] = opened.get_tensor(key)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    return found


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path, kind=StoreKind.safetensors)


def test_every_dtype_and_layout_comes_back_through_the_library(
    store: CaptureStore, tmp_path: Path
) -> None:
    tensors = {
        "odd": torch.randn(7).bfloat16(),  # what follows lies at no multiple of its size
        "float32": torch.randn(3, 5),
        "float16": torch.randn(5, 3).half(),
        "transposed": torch.randn(4, 6).bfloat16().T,
        "strided": torch.randn(8, 8)[::2, 1::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    for name, x in tensors.items():
        add(store, name, x)
    store.flush()
    finish_capture(tmp_path)
    found = kept(tmp_path)
    for entry, (name, x) in zip(open_capture(tmp_path), tensors.items(), strict=True):
        assert entry.metadata["key"] == f"bf16/{name}"
        for y in (entry.torch(), found[f"bf16/{name}"]):
            assert y.dtype == x.dtype
            assert torch.equal(y, x)
        assert entry.is_intact()
    store.close()


def test_a_shard_is_full_by_its_bytes_or_its_header(
    store: CaptureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    for i, size in enumerate((100, 100, 100, 2000, 100)):  # float32: 400 bytes, 8000
        add(store, f"a{i}", torch.full((size,), float(i)))
    store.send()
    store.queue.flush()
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 28)
    for i in range(900):
        add(store, f"{i}-{'long' * 20}", torch.full((1,), float(i)))
    store.close()
    finish_capture(tmp_path)
    files = sorted((tmp_path / "shards").iterdir())
    assert all(file.suffix == ".safetensors" for file in files)
    counts = [len(safetensors.torch.load_file(file)) for file in files]
    assert counts[:3] == [2, 1, 1]
    assert sum(counts) == 905
    assert len(counts) > 4
    assert len(kept(tmp_path)) == 905


def test_reading_maps_the_shard_and_writing_changes_no_file(
    store: CaptureStore, tmp_path: Path
) -> None:
    add(store, "a", torch.zeros(1 << 16))
    store.close()
    (entry,) = open_capture(tmp_path)
    entry.torch().fill_(7.0)
    assert entry.torch().unique().tolist() == [0.0]


def test_a_shard_that_is_open_can_be_read_and_is_no_safetensors_file(
    store: CaptureStore, tmp_path: Path
) -> None:
    add(store, "a", torch.ones(3))
    store.send()
    store.queue.flush()
    (part,) = (tmp_path / "shards").iterdir()
    assert part.name == "rank0-00001.safetensors.part"
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(part)
    (entry,) = open_capture(tmp_path)
    assert entry.torch().tolist() == [1, 1, 1]
    store.flush()
    assert entry.torch().tolist() == [1, 1, 1]
    store.close()


def test_what_a_killed_process_left_is_sealed_up_to_the_last_whole_tensor(
    store: CaptureStore, tmp_path: Path
) -> None:
    add(store, "a", torch.ones(3))
    add(store, "b", torch.full((4,), 2.0))
    store.send()
    store.queue.flush()
    (part,) = (tmp_path / "shards").iterdir()
    with part.open("ab") as stream:
        stream.write(b"half a ten")
    finish_capture(tmp_path)
    assert {key: x.tolist() for key, x in kept(tmp_path).items()} == {
        "bf16/a": [1, 1, 1],
        "bf16/b": [2, 2, 2, 2],
    }
    before = (tmp_path / INDEX).read_bytes()
    finish_capture(tmp_path)
    assert (tmp_path / INDEX).read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        {"offsets": [65537, 65549]},
        {"offsets": [65536, 99999]},
        {"offsets": None},
        {"shape": None, "dtype": "none"},
        {"dtype": "none"},
    ],
)
def test_a_part_that_is_not_as_the_manifest_says_stays_and_is_refused(
    store: CaptureStore, tmp_path: Path, line: dict[str, Any]
) -> None:
    add(store, "a", torch.ones(3))
    store.send()
    store.queue.flush()
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | line) + "\n")
    finish_capture(tmp_path)
    (part,) = (tmp_path / "shards").iterdir()
    assert part.name.endswith(".part")
    (entry,) = open_capture(tmp_path)
    words = r"does not hold bf16/a at bytes|line of bf16/a lacks offsets, shape or dtype of its val"
    with pytest.raises(CaptureError, match=words):
        entry.torch()


def test_a_later_process_takes_other_names_and_ranks_their_own(tmp_path: Path) -> None:
    for rank, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
        store = CaptureStore(tmp_path, rank, kind=StoreKind.safetensors)
        add(store, f"x{value:.0f}", torch.full((2,), value), rank=rank)
        store.close()
    assert sorted(file.name for file in (tmp_path / "shards").iterdir()) == [
        "rank0-00001.safetensors",
        "rank0-00002.safetensors",
        "rank1-00001.safetensors",
    ]
    assert len(open_capture(tmp_path)) == 3
    finish_capture(tmp_path)
    assert not list(tmp_path.glob("manifest.rank*"))
    assert {key: x.tolist() for key, x in kept(tmp_path).items()} == {
        f"bf16/x{i}": [i, i] for i in (1, 2, 3)
    }


def test_a_disk_that_fills_up_leaves_what_was_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        """A disk with room for a header and 1000 bytes."""
        room = HEADER_BYTES + 1000 - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (content,) = parts
        return real(descriptor, [content[:room]], offset)

    monkeypatch.setattr(os, "pwritev", full)
    store = CaptureStore(tmp_path, kind=StoreKind.safetensors)
    for i in range(3):
        add(store, str(i), torch.full((100,), float(i)))
    with pytest.raises(CaptureError, match=r"bf16/2.pt: No space left on device; free some space"):
        store.flush()
    store.close()
    finish_capture(tmp_path)
    assert {key: x.unique().item() for key, x in kept(tmp_path).items()} == {
        "bf16/0": 0,
        "bf16/1": 1,
    }
    assert len(open_capture(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("num_fitting", [0, 1, 2, 3])
def test_of_tensors_written_together_a_full_disk_keeps_those_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_fitting: int
) -> None:
    real, end = os.pwritev, HEADER_BYTES + 400 * num_fitting

    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if offset + sum(map(len, parts)) > end:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, parts, offset)

    files = ShardFiles(tmp_path, rank=0)
    together = [files.prepared(f"{i}.pt", torch.full((100,), float(i)), {}) for i in range(4)]
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left on device"):
        files.write(together, is_behind=False)
    assert [one.place is not None for one in together] == [i < num_fitting for i in range(4)]
    if num_fitting:
        (shard,) = (tmp_path / "shards").iterdir()
        found = safetensors.torch.load_file(shard)
        assert {key: x.unique().item() for key, x in found.items()} == {
            str(i): i for i in range(num_fitting)
        }
    else:
        assert not list((tmp_path / "shards").iterdir())


def test_tensors_written_together_go_into_as_many_shards_as_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1000)
    sizes = [100, 150, 1, 600, 0, 50]  # of four bytes: 400 + 600 | 4 | 2400 | 0 + 200
    files = ShardFiles(tmp_path, rank=0)
    together = [files.prepared(f"{i}.pt", torch.full((n,), 1.0), {}) for i, n in enumerate(sizes)]
    files.write(together, is_behind=False)
    files.seal()
    found = [
        {key: x.numel() for key, x in safetensors.torch.load_file(path).items()}
        for path in sorted((tmp_path / "shards").iterdir())
    ]
    assert found == [{"0": 100, "1": 150}, {"2": 1}, {"3": 600}, {"4": 0, "5": 50}]


def test_a_disk_without_room_for_a_header_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    store = CaptureStore(tmp_path, kind=StoreKind.safetensors)
    add(store, "a", torch.ones(3))
    with pytest.raises(CaptureError, match="No space left on device"):
        store.flush()
    store.close()
    assert not list((tmp_path / "shards").iterdir())


def test_a_run_into_shards_holds_what_one_into_files_does(
    run_tiny: RunTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = run_tiny(f"capture.dir={tmp_path / 'files'}")
    run = run_tiny("capture.store=safetensors", "force=true")
    folder = run.tensors
    assert len(list((folder / "shards").iterdir())) == 1
    assert not list(folder.rglob("*.pt"))
    in_files = open_capture(files.captured(str(tmp_path / "files"))).with_values()
    in_shards = open_capture(run.root).with_values()
    known = kept(folder)
    for one, other in zip(in_files, in_shards, strict=True):
        assert one.metadata["hash"] == other.metadata["hash"]
        assert one.name.split("_", 2)[2] == other.name.split("_", 2)[2]  # but for the time
        assert torch.equal(known[other.name], one.torch())
    assert main(["captures", str(folder), "--check"]) == 0
    assert main(["captures", str(folder)]) == 0
    assert f" tensors, {len(in_shards)} with values in 1 shard, " in capsys.readouterr().out
    assert main(["captures", str(folder), "--export", str(tmp_path / "out"), "layer=0"]) == 0
    (first, *_) = in_shards.select(layer=0)
    content = torch.load(tmp_path / "out" / f"{first.name}.pt", weights_only=True)
    assert torch.equal(content["tensor"], first.torch())
    assert content["metadata"].keys() & {"file", "key", "offsets"} == set()
    assert content["metadata"]["statistics"] == first.metadata["statistics"]


def test_a_run_whose_disk_fills_up_ends_with_one_line_and_its_shards_sealed(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev

    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if offset > HEADER_BYTES + 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", full)
    run = run_tiny("capture.store=safetensors", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "No space left on device; free some space, set capture.dir" in status.reason
    (shard,) = (run.tensors / "shards").iterdir()
    assert len(safetensors.torch.load_file(shard)) == len(open_capture(run.tensors).with_values())
    stopped = run_tiny("capture.store=safetensors", "capture.train_on_if_full=true", "force=true")
    status = read_status(stopped.status)
    assert status is not None
    assert status.state is State.COMPLETED
    assert kept(stopped.tensors)


def test_a_key_cannot_lead_an_export_out_of_its_folder(
    store: CaptureStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(store, "a", torch.ones(3))
    store.close()
    manifest = tmp_path / "manifest.jsonl"
    line = json.loads(manifest.read_text()) | {"key": "../../evil"}
    manifest.write_text(json.dumps(line) + "\n")
    out = tmp_path / "out" / "below"
    assert main(["captures", str(tmp_path), "--export", str(out)]) == 1
    assert "names ../../evil, which is outside the folder" in capsys.readouterr().err
    assert not list(tmp_path.rglob("evil*"))
