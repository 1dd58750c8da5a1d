"""Full disks: what was written before stays whole, the message names the file, and nothing half-written is left."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.errors import CaptureError
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.safetensors import write_safetensors
from quantexp.runs.disk import writing
from quantexp.schema import StoreKind
from quantexp.training.megatron import publish
from tests.hostile.captured import write_capture


@contextlib.contextmanager
def most_bytes(number: int) -> Iterator[None]:
    """No file may become larger; Python ignores the signal, so the write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", StoreKind)
def test_a_capture_keeps_what_it_lists(
    tmp_path: Path, cases: Iterator[random.Random], kind: StoreKind
) -> None:
    refused = 0
    for number, source in enumerate(itertools.islice(cases, 1000)):
        folder = tmp_path / str(number)
        message = ""
        try:
            with most_bytes(source.randrange(200, 12_000)):
                write_capture(folder, kind)
        except CaptureError as error:
            message = str(error)
        if message:
            refused += 1
            why = r"(File too large|No space left on device|it takes no more bytes, of .*)"
            assert re.fullmatch(rf"captured .* written to {folder}/.*: {why}; free .*", message)
        assert not list(folder.rglob("*.part"))
        with contextlib.suppress(CaptureError):  # nothing was listed
            for entry in open_capture(folder).with_values():
                entry.verified()
    assert refused


def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_one(
    tmp_path: Path, cases: Iterator[random.Random], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_all(whole: object, model: object, part: Path, *rest: object) -> None:
        (part / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(0))
        write_safetensors(part / "padding.safetensors", {"rows": torch.arange(2000)}, {})

    monkeypatch.setattr(publish, "_write_all", write_all)
    first, second = (tmp_path / f"iteration_0000000{i}" for i in (1, 2))

    def save(folder: Path) -> None:
        with writing(folder):
            publish.save_published(None, None, folder)  # type: ignore[arg-type]

    save(first)
    for source in cases:
        with most_bytes(source.randrange(20, 17_000)), pytest.raises(OSError, match=r".") as full:
            save(second)
        assert full.value.filename == str(second)
        assert [path.name for path in tmp_path.iterdir()] == [first.name]
        require_intact(first)
    save(second)
    require_intact(second)
