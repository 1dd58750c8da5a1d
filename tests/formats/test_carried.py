"""A run records the certificate that matches its numerics, and its identity does not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quantexp.formats.certificate import save, standing
from quantexp.launch.identity import hash8
from quantexp.launch.outcome import outcome
from quantexp.runs.paths import RunDir
from quantexp.runs.status import read_json
from quantexp.schema import Experiment

from .test_certificate import make_certificate


def test_a_run_carries_the_certificate_of_its_cache(
    run_tiny: Callable[..., RunDir], tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    file = save(make_certificate(), tmp_path)
    experiment = tiny(f"paths.cache={tmp_path}", "capture=off")
    run = run_tiny(f"paths.cache={tmp_path}", "capture=off")
    content = read_json(run.provenance)
    status = standing(tmp_path, "cpu")
    assert content["verified"] == status.record()
    assert content["verified"]["certificate"] == read_json(file)
    assert outcome(experiment, run).verified == status.words
    assert run.root.name.endswith(hash8(content["identity"]))
    assert "verified" not in content["identity"]
