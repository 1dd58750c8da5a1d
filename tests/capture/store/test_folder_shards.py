"""Shards: read by the safetensors library, whatever their content and however writing ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from quantexp.capture import open_capture
from quantexp.capture.store.files import ShardFiles
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import INDEX, finish_capture
from quantexp.capture.store.metadata import About
from quantexp.cli.main import main
from quantexp.errors import CaptureError
from quantexp.folders import beside
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


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that the safetensors library reads, by key of the index."""
    index = json.loads((folder / INDEX).read_text())
    tensors = {}
    for key, file in index["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            tensors[key] = opened.get_tensor(key)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    return tensors


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
    by_key = read_shards(tmp_path)
    for entry, (name, x) in zip(open_capture(tmp_path), tensors.items(), strict=True):
        assert entry.metadata["key"] == f"bf16/{name}"
        for y in (entry.torch(), by_key[f"bf16/{name}"]):
            assert y.dtype == x.dtype
            assert torch.equal(y, x)
        assert entry.is_intact()
    store.close()


def test_a_shard_has_the_tensors_of_a_batch(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path, queue_bytes=8000, kind=StoreKind.safetensors)
    for i, size in enumerate(
        (100, 100, 100, 2000, 100)
    ):  # float32; an eighth of the queue is enough
        add(store, f"a{i}", torch.full((size,), float(i)))
    store.close()
    finish_capture(tmp_path)
    files = sorted((tmp_path / "shards").iterdir())
    assert [file.name for file in files] == [f"rank0-0000{i}.safetensors" for i in (1, 2, 3)]
    keys = [list(safetensors.torch.load_file(file)) for file in files]
    assert keys == [["bf16/a0", "bf16/a1", "bf16/a2"], ["bf16/a3"], ["bf16/a4"]]
    assert len(read_shards(tmp_path)) == 5


def test_a_shard_may_have_thousands_of_tensors(store: CaptureStore, tmp_path: Path) -> None:
    for i in range(2000):
        add(store, f"{i}-{'long' * 20}", torch.full((1,), float(i)))
    store.close()
    finish_capture(tmp_path)
    (file,) = (tmp_path / "shards").iterdir()
    assert len(safetensors.torch.load_file(file)) == len(read_shards(tmp_path)) == 2000


def test_a_shard_can_be_read_by_whoever_may_read_other_files(
    store: CaptureStore, tmp_path: Path
) -> None:
    add(store, "a", torch.ones(3))
    store.close()
    (shard,) = (tmp_path / "shards").iterdir()
    assert shard.stat().st_mode == (tmp_path / "manifest.jsonl").stat().st_mode


def test_reading_maps_the_shard_and_writing_changes_no_file(
    store: CaptureStore, tmp_path: Path
) -> None:
    add(store, "a", torch.zeros(1 << 16))
    store.close()
    (entry,) = open_capture(tmp_path)
    entry.torch().fill_(7.0)
    assert entry.torch().unique().tolist() == [0.0]


def test_files_of_a_killed_process_are_replaced_by_the_next(
    store: CaptureStore, tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "rank0-00001.safetensors.part").write_bytes(b"half a ten")
    add(store, "a", torch.ones(3))
    store.close()
    finish_capture(tmp_path)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["rank0-00001.safetensors"]
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
def test_a_shard_that_differs_from_the_manifest_is_refused(
    store: CaptureStore, tmp_path: Path, line: dict[str, Any]
) -> None:
    add(store, "a", torch.ones(3))
    store.flush()
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | line) + "\n")
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
    assert {key: x.tolist() for key, x in read_shards(tmp_path).items()} == {
        f"bf16/x{i}": [i, i] for i in (1, 2, 3)
    }


def test_a_disk_that_fills_up_leaves_the_shards_before(store: CaptureStore, tmp_path: Path) -> None:
    for i in range(3):
        add(store, str(i), torch.full((100,), float(i)))
    store.flush()
    (tmp_path / "shards" / "rank0-00002.safetensors.part").symlink_to("/dev/full")
    for i in range(3, 6):
        add(store, str(i), torch.full((100,), float(i)))
    with pytest.raises(CaptureError, match=r"bf16/3.pt: No space left on device; free some space"):
        store.flush()
    store.close()
    finish_capture(tmp_path)
    assert {key: x.unique().item() for key, x in read_shards(tmp_path).items()} == {
        f"bf16/{i}": i for i in range(3)
    }
    assert len(open_capture(tmp_path)) == 3
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["rank0-00001.safetensors"]


def test_a_run_into_shards_stores_what_one_into_files_does(
    run_tiny: RunTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = run_tiny(f"capture.dir={tmp_path / 'files'}")
    run = run_tiny("capture.store=safetensors", "force=true")
    folder = run.tensors
    assert len(list((folder / "shards").iterdir())) == 1
    assert not list(folder.rglob("*.pt"))
    in_files = open_capture(files.captured(str(tmp_path / "files"))).with_values()
    in_shards = open_capture(run.root).with_values()
    by_key = read_shards(folder)
    for one, other in zip(in_files, in_shards, strict=True):
        assert one.metadata["hash"] == other.metadata["hash"]
        assert one.name.split("_", 2)[2] == other.name.split("_", 2)[2]  # except for the time
        assert torch.equal(by_key[other.name], one.torch())
    assert main(["captures", str(folder), "--check"]) == 0
    assert main(["captures", str(folder)]) == 0
    assert f" tensors, {len(in_shards)} with values in 1 shard, " in capsys.readouterr().out
    assert main(["captures", str(folder), "--export", str(tmp_path / "out"), "layer=0"]) == 0
    (first, *_) = in_shards.select(layer=0)
    content = torch.load(tmp_path / "out" / f"{first.name}.pt", weights_only=True)
    assert torch.equal(content["tensor"], first.torch())
    assert content["metadata"].keys() & {"file", "key", "offsets"} == set()
    assert content["metadata"]["statistics"] == first.metadata["statistics"]


def test_a_run_whose_disk_fills_up_ends_with_one_line_and_whole_shards(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ShardFiles._next

    def full(self: ShardFiles) -> Path:
        path = real(self)
        if path.name == "rank0-00002.safetensors":
            beside(path).symlink_to("/dev/full")
        return path

    monkeypatch.setattr(ShardFiles, "_next", full)
    run = run_tiny("capture.store=safetensors", "capture.iterations=[1,2]", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "No space left on device; free some space, set capture.dir" in status.reason
    (shard,) = (run.tensors / "shards").iterdir()
    assert len(safetensors.torch.load_file(shard)) == len(open_capture(run.tensors).with_values())
    more = ["capture.train_on_if_full=true", "capture.iterations=[1,2]", "force=true"]
    stopped = run_tiny("capture.store=safetensors", *more)
    status = read_status(stopped.status)
    assert status is not None
    assert status.state is State.COMPLETED
    assert read_shards(stopped.tensors)


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
