"""The replays of a search are jobs; the command waits for them and names the culprit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.runs.find import runs_below
from quantexp.runs.status import State

from .cluster import Cluster
from .launched import status_of, submitted, until_state


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_format_that_clips_one_product_is_named_by_jobs(
    plain: Cluster, tiny_words: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clipped = "{element: {values: [-0.0078125, 0, 0.0078125]}, block: tensor, scale: none}"
    words = ["training.iterations=3", "capture=off", "quant=linear_mxfp8"]
    words += ["checkpoint.every=1", "checkpoint.optimizer=true"]
    words += [f"+quant.formats.clipped={clipped}"]
    words += ["quant.rules=[{products: [dgrad], operands: [w], format: clipped}]"]
    (run,), (job,) = submitted(tiny_words, in_tmp / "runs", words)
    until_state(run, State.COMPLETED, State.FAILED, within_s=240)
    flags = ["--measure", "gradient", "--from", "1", "--by", "product", "--json", "out=found"]
    assert main(["bisect", str(run.root), *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["keep_in_bf16"] == ["linear.dgrad"]
    replays = runs_below(in_tmp / "runs/bisect" / run.root.name)
    assert len(replays) >= 4
    jobs = {status_of(replay).job_id for replay in replays}
    assert job not in jobs
    assert len(jobs) == len(replays)
