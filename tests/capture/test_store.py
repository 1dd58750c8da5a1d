"""What is on disk, whatever happens to the process that writes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from blake3 import blake3

from quantexp.capture import open_capture
from quantexp.capture.ending import finish_capture
from quantexp.capture.store import CaptureStore
from quantexp.schema import StoreKind

#: Imports torch once, then forks writers and kills each at a random moment of its work.
KILLER = """\
import os, random, signal, sys, time
from pathlib import Path
import torch
from quantexp.capture import shards
from quantexp.capture.store import CaptureStore
from quantexp.schema import StoreKind

shards.SHARD_BYTES = 1 << 20

def write(folder, in_pages):
    store = CaptureStore(folder, queue_bytes=1 << 20, kind=StoreKind[sys.argv[2]])
    for i in range(10**9):
        x = torch.full((64, 256 * (1 + i % 7) if in_pages else 1 + i % 97), float(i))
        store.add(f"bf16/{i}.pt", x, {"i": i, "shape": list(x.shape), "dtype": "float32"})

generator = random.Random(0)
for turn in range(25):
    child = os.fork()
    if not child:
        write(Path(sys.argv[1]) / str(turn), in_pages=turn % 2 == 0)
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
    """Every tensor that the manifest names."""
    manifest = folder / "manifest.jsonl"
    text = manifest.read_text() if manifest.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for entry, line in zip(open_capture(folder) if lines else (), lines, strict=True):
        raw = entry.torch().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert "blake3:" + blake3(raw).hexdigest() == line["hash"]
        assert bool((entry.torch() == line["i"]).all())
    return len(lines)


def _check_each_file(folder: Path) -> int:
    """A file that looks whole is whole, listed or not; how many tensors there are."""
    found = 0
    for file in folder.rglob("*.pt"):
        content = torch.load(file, weights_only=True)
        assert bool((content["tensor"] == content["metadata"]["i"]).all())
        found += 1
    for file in folder.rglob("*.safetensors"):
        for key, x in safetensors.torch.load_file(file).items():
            assert bool((x == int(key.removeprefix("bf16/"))).all())
            found += 1
    return found


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
    store.add("bf16/a.pt", x, {"shape": list(x.shape), "dtype": "float32"})
    store.flush()
    (entry,) = open_capture(tmp_path)
    found = entry.torch()
    assert found.shape == x.shape
    assert torch.equal(found.nan_to_num(7.0), x.nan_to_num(7.0))
    store.close()


@pytest.mark.parametrize("kind", StoreKind)
def test_values_are_those_of_the_moment_they_were_taken(tmp_path: Path, kind: StoreKind) -> None:
    store, x = CaptureStore(tmp_path, kind=kind), torch.zeros(1000)
    for i in range(20):
        x.fill_(i)
        store.add(f"bf16/{i}.pt", x, {"shape": [1000], "dtype": "float32"})
    store.close()
    for i, entry in enumerate(open_capture(tmp_path)):
        assert entry.torch().unique().tolist() == [i]


@pytest.mark.parametrize("kind", StoreKind)
def test_files_of_others_are_left_alone(tmp_path: Path, kind: StoreKind) -> None:
    (tmp_path / "shards").mkdir()
    others = [tmp_path / name for name in ("notes.txt", "other.part", "shards/x.safetensors.part")]
    for other in others:
        other.write_text("mine")
    store = CaptureStore(tmp_path, kind=kind)
    store.add("bf16/a.pt", torch.zeros(3), {"shape": [3], "dtype": "float32"})
    store.close()
    finish_capture(tmp_path)
    assert [other.read_text() for other in others] == ["mine"] * 3
