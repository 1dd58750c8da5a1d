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

from quantexp.capture import open_capture
from quantexp.errors import CaptureError
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.checkpoints import folder_of
from quantexp.runs.paths import RunDir
from quantexp.schema import StoreKind
from tests.hostile.captured import write_capture
from tests.model.small_checkpoints import save, tiny_llama


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
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    run, experiment = RunDir(tmp_path), tiny_llama()
    save(run, experiment, 1)
    whole = folder_of(run, 1)
    largest = max(file.stat().st_size for file in whole.rglob("*.*") if file.is_file())
    for source in itertools.islice(cases, 100):
        with (
            most_bytes(source.randrange(20, largest)),
            pytest.raises(OSError, match=r".") as full,
        ):
            save(run, experiment, 2)
        assert "iteration_00000002" in full.value.filename
        assert [path.name for path in run.checkpoints.iterdir()] == [whole.name]
        require_intact(whole)
    save(run, experiment, 2)
    require_intact(folder_of(run, 2))
