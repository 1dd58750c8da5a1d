from __future__ import annotations

import json

from quantexp.analysis.compare.side import read_side
from quantexp.analysis.report.facts import Origin, facts
from quantexp.analysis.report.proof import Proof
from tests.analysis.compare.runs import Runs


def test_steps_that_were_left_out_are_shown_with_what_was_not_finite(runs: Runs) -> None:
    run = runs.add()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines[1:3]:
        line |= {
            "skipped": True,
            "nonfinite": f"the loss of micro-batch {line['iteration']} is nan",
        }
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = dict(facts(read_side(run), Proof(True, ""), Origin()))
    assert rows["steps left out"] == "in iterations 2-3; in 3, the loss of micro-batch 3 is nan"
    assert "steps left out" not in dict(facts(read_side(runs.add()), Proof(True, ""), Origin()))
