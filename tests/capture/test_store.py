"""What is on disk, whatever happens to the process that writes it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantexp.capture.store import CaptureStore

#: Imports torch once, then forks writers and kills each at a random moment of its work.
KILLER = """\
import os, random, signal, sys, time
from pathlib import Path
import torch
from quantexp.capture.store import CaptureStore

def write(folder):
    store = CaptureStore(folder, queue_bytes=1 << 20)
    for i in range(10**9):
        store.add(f"bf16/{i}.pt", torch.full((64, 1 + i % 97), float(i)), {"i": i})

generator = random.Random(0)
for turn in range(50):
    child = os.fork()
    if not child:
        write(Path(sys.argv[1]) / str(turn))
    time.sleep(generator.uniform(0.005, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_kill_at_any_moment_leaves_only_whole_tensors_in_the_manifest(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], check=True)
    listed = [_check_whole(tmp_path / str(turn)) for turn in range(50)]
    assert sum(listed) > 50


def _check_whole(folder: Path) -> int:
    manifest = folder / "manifest.jsonl"
    text = manifest.read_text() if manifest.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for line in lines:
        content = torch.load(folder / line["file"], weights_only=True)["tensor"]
        raw = content.view(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest() == line["hash"]
    for file in folder.rglob("*.pt"):  # a file that looks whole is whole, listed or not
        content = torch.load(file, weights_only=True)
        assert content["tensor"].unique().tolist() == [float(content["metadata"]["i"])]
    return len(lines)


@pytest.mark.parametrize(
    "x",
    [torch.empty(0), torch.empty(3, 0, 2), torch.full((3, 2), float("nan")), torch.tensor(1.5)],
    ids=["empty", "zero-size", "nan", "scalar"],
)
def test_odd_tensors_are_stored_bit_for_bit(tmp_path: Path, x: torch.Tensor) -> None:
    store = CaptureStore(tmp_path)
    store.add("bf16/a.pt", x, {})
    store.flush()
    found = torch.load(tmp_path / "bf16/a.pt", weights_only=True)["tensor"]
    assert found.shape == x.shape
    assert torch.equal(found.nan_to_num(7.0), x.nan_to_num(7.0))
    store.close()


def test_values_are_those_of_the_moment_they_were_taken(tmp_path: Path) -> None:
    store, x = CaptureStore(tmp_path), torch.zeros(1000)
    for i in range(20):
        x.fill_(i)
        store.add(f"bf16/{i}.pt", x, {})
    store.close()
    for i in range(20):
        content = torch.load(tmp_path / f"bf16/{i}.pt", weights_only=True)
        assert content["tensor"].unique().tolist() == [i]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.part").write_text("mine too")
    store = CaptureStore(tmp_path)
    store.add("bf16/a.pt", torch.zeros(3), {})
    store.close()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "other.part").read_text() == "mine too"
