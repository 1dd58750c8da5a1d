"""Damage to checkpoints, and to the safetensors and .pt files of other people: named in one line, nothing is loaded."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import xxhash
from safetensors.torch import load_file, save_file

from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError, DataError
from quantexp.model.checkpoint_hashes import HASHES, record_hashes, require_intact
from quantexp.model.checkpoints import PADDING, STATE, STATE_INDEX
from quantexp.model.huggingface.weights import open_weights, read_rows
from tests.hostile.damage import ANY

WEIGHTS, RANK, INDEX = (
    "model.safetensors",
    f"{STATE}/rank00000.safetensors",
    f"{STATE}/{STATE_INDEX}",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run."""
    root = tmp_path_factory.mktemp("run")
    for iteration in (2, 4):
        folder = root / f"iteration_{iteration:08d}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(iteration)
        tensors = {f"layer.{i}": torch.randn(8, 16, generator=generator) for i in range(4)}
        save_file(tensors, folder / WEIGHTS)
        save_file({"rows": torch.randn(2, 16, generator=generator)}, folder / PADDING)
        (folder / STATE).mkdir()
        save_file({f"main/{name}": x for name, x in tensors.items()}, folder / RANK)
        (folder / INDEX).write_text('{"version": 1}\n')
        (folder / "config.json").write_text('{"hidden_size": 16}\n')
        (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
        record_hashes(folder, iteration)
    return root


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        require_intact(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"before it is {folder.parent / 'iteration_00000002'}")
    return str(caught.value)


def test_every_damage_of_any_file_is_named(run: Path, cases: Iterator[random.Random]) -> None:
    folder = run / "iteration_00000004"
    for source in cases:
        file = source.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        before = file.read_bytes()
        source.choice(ANY)(source, file)
        is_changed = not file.exists() or file.read_bytes() != before
        try:
            if file.name == HASHES and not file.exists():
                require_intact(folder)  # as a folder of another program
            elif is_changed and not (file.name == HASHES and _same_json(before, file)):
                assert str(file) in refusal(folder)
        finally:
            file.write_bytes(before)
        require_intact(folder)


def _same_json(before: bytes, file: Path) -> bool:
    try:
        return bool(json.loads(before) == json.loads(file.read_bytes()))
    except (ValueError, RecursionError):
        return False


def test_a_checkpoint_without_hashes_is_used_with_a_message(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run / "iteration_00000004"
    before = (folder / HASHES).read_bytes()
    (folder / HASHES).unlink()
    require_intact(folder)
    (folder / HASHES).write_bytes(before)
    words = f"{folder / HASHES} is missing: the checkpoint is used without a check"
    assert [record.getMessage() for record in caplog.records] == [words]


def swap_hashes(folder: Path) -> None:
    other = folder.with_name("iteration_00000002") / HASHES
    (folder / HASHES).write_bytes(other.read_bytes())


def edit_hashes(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / HASHES).read_bytes())
        change(content)
        (folder / HASHES).write_text(json.dumps(content))

    return damage


def forge_hashes(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The change, with the hash that the changed list has."""

    def forge(content: dict[str, Any]) -> None:
        del content["xxh3_128"]
        change(content)
        text = json.dumps(content, sort_keys=True)
        content["xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())

    return edit_hashes(forge)


def copy_other(folder: Path) -> None:
    """All files of the earlier checkpoint, as a folder that was renamed."""
    shutil.copytree(folder.with_name("iteration_00000002"), folder, dirs_exist_ok=True)


def to_link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder.with_name("iteration_00000002") / WEIGHTS)


def to_dangling(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "nothing")

    return damage


def to_folder(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (swap_hashes, r"holds the checkpoint of iteration 2: it was renamed or copied"),
        (copy_other, r"holds the checkpoint of iteration 2: it was renamed or copied"),
        (to_link, r"model\.safetensors is damaged: its content is not .*\(first in layer\.0\)"),
        (to_dangling(RANK), r"state/rank00000\.safetensors is missing"),
        (to_dangling(HASHES), r"hashes\.json is missing"),
        (to_folder, r"state/state\.json is not a regular file"),
        (edit_hashes(lambda c: c["files"].pop(WEIGHTS)), r"hashes\.json .*its content does not match its own hash"),
        (edit_hashes(lambda c: c.update(iteration=2)), r"hashes\.json .*its content does not match its own hash"),
        (forge_hashes(lambda c: c["files"].pop(INDEX)),
         r"state/state\.json was not saved with the checkpoint: remove it"),
        (forge_hashes(lambda c: c["files"].update({"../x": c["files"][RANK]})),
         r"hashes\.json .*'\.\./x' is not the name of a saved file"),
        (forge_hashes(lambda c: c["files"].update({"state/../x": c["files"][RANK]})),
         r"hashes\.json .*'state/\.\./x' is not the name of a saved file"),
        (write(HASHES, "[" * 100_000), r"hashes\.json, line 1: depth limit exceeded"),
        (write("model.safetensors.index.json", '{"weight_map": {"layer.0": "evil.safetensors"}}'),
         r"index\.json was not saved with the checkpoint: remove it"),
        (write("state/evil.safetensors", ""), r"state/evil\.safetensors was not saved with the che"),
        (write("evil.safetensors", ""), r"evil\.safetensors was not saved with the checkpoint: rem"),
    ],
)  # fmt: skip
def test_a_forger_without_care_is_noticed(
    tmp_path: Path, run: Path, damage: Callable[[Path], object], words: str
) -> None:
    for name in ("iteration_00000002", "iteration_00000004"):
        shutil.copytree(run / name, tmp_path / name)
    damage(tmp_path / "iteration_00000004")
    with pytest.raises(DataError, match=words):
        require_intact(tmp_path / "iteration_00000004")


def header_of(source: random.Random, size: int) -> bytes:
    """The header of a file of `size` bytes of values; most say something that is not so."""
    big = (2**63, 2**64 - 1, 10**30, -1, 1.5, "8", None, True)

    def number() -> Any:
        return source.choice((0, 4, 8, size, size + 1, *big)) if source.random() < 0.3 else None

    entries: dict[str, Any] = {}
    end = 0
    for i in range(source.randrange(1, 4)):
        rows = source.randrange(0, 4)
        start, end = end, end + rows * 16
        entries[f"t{i}"] = {
            "dtype": source.choice(("F32", "F32", "F32", "I32", "BF16", "F4", "X9", 3)),
            "shape": [rows, 4 if (n := number()) is None else n],
            "data_offsets": [start, end if (n := number()) is None else n],
        }
    text = json.dumps(entries)
    if source.random() < 0.2:  # a name twice
        text = text[:-1] + ', "t0": ' + json.dumps(entries["t0"]) + "}"
    if source.random() < 0.1:
        text = source.choice(("[" * 50_000, "{}", "[]", "5", '{"a":' * 3000, "9" * 5000))
    return text.encode()


def test_no_safetensors_file_crashes_or_is_read_beyond_its_end(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    """What is accepted, the library accepts too, with the same values."""
    accepted = 0
    file = tmp_path / WEIGHTS
    for source in cases:
        values = source.randbytes(source.choice((0, 16, 64, 96)))
        head = header_of(source, len(values))
        length = len(head) if source.random() < 0.8 else source.choice((0, 2**63, 2**64 - 1, 10**9))
        file.write_bytes(struct.pack("<Q", length) + head + values)
        try:
            tensors = open_weights(tmp_path).tensors
        except DataError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert len(str(error)) < 600  # noqa: PT017
            continue
        accepted += 1
        assert all(stored.stop <= file.stat().st_size for stored in tensors.values())
        try:
            library = load_file(file)
        except safetensors.SafetensorError as error:
            assert "dtype" in str(error) or "variant" in str(error)  # noqa: PT017
            continue
        except (KeyError, ValueError):  # a dtype that this torch does not load
            continue
        for name, stored in tensors.items():
            if stored.dtype == "F32":
                rows = read_rows(stored, 0, stored.shape[0])
                one, other = (np.asarray(x).tobytes() for x in (rows, library[name]))
                assert one == other
    assert accepted


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.target,)


def repacked(content: bytes, source: random.Random, target: Path) -> bytes:
    """A .pt file with members that lie: compressed, shorter, missing, repeated, or of another pickle."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
        how = source.choice(("compress", "shorten", "drop", "repeat", "pickle", "nest", "bomb"))
        victim = source.choice(old.namelist())
        for name in old.namelist():
            data = old.read(name)
            if name == victim and how in ("shorten", "nest"):
                data = data[: source.randrange(len(data) + 1)] if how == "shorten" else content
            if name.endswith("data.pkl") and how in ("pickle", "bomb"):
                bomb = io.BytesIO()
                torch.save(Bomb(target), bomb)
                inner = zipfile.ZipFile(bomb)
                data = inner.read(next(n for n in inner.namelist() if n.endswith("data.pkl")))
            if name == victim and how == "drop":
                continue
            kind = zipfile.ZIP_DEFLATED if how == "compress" else zipfile.ZIP_STORED
            new.writestr(name, data, kind)
            if name == victim and how == "compress":
                new.writestr(f"{name}.bomb", bytes(1 << 22), zipfile.ZIP_DEFLATED)
            if name == victim and how == "repeat":
                new.writestr(f"{name}2", data, kind)
    return packed.getvalue()


def test_no_pt_file_runs_code_crashes_or_gives_other_values(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    ran = tmp_path / "ran"
    x = torch.arange(64, dtype=torch.bfloat16)
    written = io.BytesIO()
    torch.save({"tensor": x, "metadata": {"layer": 0}}, written)
    (tmp_path / "a.pt").write_bytes(written.getvalue())
    from quantexp.capture.store.values import content_hash

    entry = CapturedTensor.of(tmp_path, {"file": "a.pt", "hash": content_hash(x)})
    for source in cases:
        content = written.getvalue()
        if source.random() < 0.6:
            content = repacked(content, source, ran)
        (tmp_path / "a.pt").write_bytes(content)
        if source.random() < 0.5:
            source.choice(ANY[:4])(source, tmp_path / "a.pt")
        try:
            assert torch.equal(entry.verified(), x)
        except CaptureError as error:
            assert "\n" not in str(error)  # noqa: PT017
        assert not ran.exists()
