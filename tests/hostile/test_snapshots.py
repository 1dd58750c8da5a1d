"""Changes of a run's source snapshot: whatever Python would import differently is noticed before the run starts."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.runs.snapshot import _digest, check_snapshot, take_snapshot
from tests.hostile.damage import flip


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of a snapshot, named as a whole one is."""
    whole: Path = take_snapshot.__wrapped__(tmp_path_factory.mktemp("runs"))
    part = whole.parent / "part"
    for folder in ("quantexp/runs", "quantexp/conf/quant"):
        shutil.copytree(whole / folder, part / folder)
    files = {str(p.relative_to(part)): p for p in part.rglob("*") if p.is_file()}
    return part.rename(part.with_name(_digest(files)))


#: A name that Python imports by itself at its start, one that hides another package, one before a source file, and
#: harmless ones.
ADDED = (
    "sitecustomize.py",
    "usercustomize.py",
    "torch.py",
    "quantexp/errors.so",
    "quantexp/errors.cpython-311-x86_64-linux-gnu.so",
    "quantexp/more.py",
    "quantexp/conf/quant/FA_mxfp8.yaml.orig",
    "x.pth",
)


def change(source: random.Random, folder: Path) -> tuple[str, Path]:
    """Change one thing; returns what, and the path to remove or restore."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = source.choice(files)
    what = source.choice(("flip", "grow", "cut", "add", "bytecode", "link", "folder link", "fifo"))
    if what in ("flip", "grow", "cut") and file.stat().st_size:
        content = file.read_bytes()
        file.chmod(0o600)
        if what == "flip":
            flip(source, file)
        else:
            file.write_bytes(content + b"\n" if what == "grow" else content[:-1])
        return what, file
    if what == "bytecode":
        path = file.parent / "__pycache__" / f"{file.stem}.cpython-311.pyc"
        path.parent.mkdir()
        path.write_bytes(b"")
        return what, path.parent
    if what == "link":
        copied = folder.parent / "copied"
        shutil.copyfile(file, copied)
        file.unlink()
        file.symlink_to(copied)
        return what, file
    added = folder / source.choice(ADDED)
    if what == "folder link":
        added = folder / source.choice(("torch", "quantexp/torch", "numpy"))
        added.symlink_to(folder.parent)
    elif what == "fifo":
        os.mkfifo(added)
    else:
        added.write_text("")
    return what, added


def test_every_change_is_noticed(snapshot: Path, cases: Iterator[random.Random]) -> None:
    content = {path: path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}
    for source in cases:
        what, path = change(source, snapshot)
        with pytest.raises(RunError, match=r"was changed in .*; submit the run again") as refused:
            check_snapshot(snapshot)
        assert "\n" not in str(refused.value), what
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path in content:
            path.unlink()
            path.write_bytes(content[path])
        else:
            path.unlink()
        check_snapshot(snapshot)
