"""The statistics that rank 0 writes for the trackers: equal to those of the capture, merged over ranks, each once."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quantexp.capture.record.recorder import Recorder
from quantexp.capture.select.curves import scores_scheme
from quantexp.capture.statistics.counts import from_json
from quantexp.capture.statistics.errors import decibel
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import STATISTICS, lines_of
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.runs.curves import CurvesLine
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.schema import Experiment
from quantexp.training.context import RunContext
from quantexp.training.curves import Curves

Tiny = Callable[..., Experiment]

ALL = "tracking.statistics=[amax,sqnr,underflow,saturation,histogram]"
WORDS = ("quant=linear_mxfp8", "capture=stats", "capture.collect_micro_batches=0", ALL)


class OneRank:
    """The curves of a rank, whose tensors a test plants."""

    def __init__(self, experiment: Experiment, root: Path, rank: int, num_ranks: int) -> None:
        self.run = RunDir(root)
        self.folder = root / "tensors"
        self.recorder = Recorder(
            experiment.capture,
            CaptureStore(self.folder, rank),
            rank,
            lambda progress: None,
            iterations=(1, 2),
            num_layers=2,
            scores_scheme=scores_scheme(experiment),
        )
        self._declared = precision_map(experiment.model, experiment.quant)
        context = RunContext(self.run, experiment, Rank(rank, num_ranks, rank))
        self.curves = Curves(context, self.recorder)

    def plant(self, x: torch.Tensor, tensor: str = "input", iteration: int = 1) -> None:
        """Record a tensor of fc1 in layer 0, as the first or a further micro-batch."""
        module = ModuleId(0, "fc1")
        self.recorder.begin(iteration, 0)
        look = self.recorder.hook(module, lambda: self._declared[module], lambda name: {})
        look("forward", "post" if tensor == "output" else "pre", tensor, x)

    def after(self, iteration: int = 1) -> CurvesLine:
        line = self.curves.after(iteration)
        assert line is not None
        return line

    def statistics(self) -> list[dict[str, Any]]:
        """Those in statistics.jsonl, in the order of planting."""
        self.recorder.flush()
        return [line["statistics"] for line in lines_of(self.folder / STATISTICS)]


@pytest.fixture
def one(tiny: Tiny, tmp_path: Path) -> Callable[..., OneRank]:
    def make(*words: str, rank: int = 0, num_ranks: int = 1) -> OneRank:
        return OneRank(tiny(*WORDS, *words), tmp_path, rank, num_ranks)

    return make


One = Callable[..., OneRank]


def normal(seed: int) -> torch.Tensor:
    """Two blocks a row, of which the first one of the first row underflows."""
    x = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 1:32] *= 2.0**-24
    return x.to(torch.bfloat16)


def test_values_are_those_of_the_captured_statistics(one: One) -> None:
    rank = one()
    rank.plant(normal(1))
    line = rank.after()
    (statistics,) = rank.statistics()
    place, fidelity = "L0-fc1/input", statistics["fidelity"]
    assert line["scalars"] == {
        f"amax/{place}": statistics["abs_max"],
        f"sqnr_db/{place}": fidelity["sqnr_db"],
        f"underflow_share/{place}": fidelity["underflow_share"],
        f"saturated_share/{place}": fidelity["saturated_share"],
    }
    assert fidelity["underflow_share"] > 0
    magnitudes = from_json(statistics["log2_magnitude"])
    assert line["histograms"] == {f"log2_magnitude/{place}": magnitudes.json()}
    assert [json.loads(text) for text in rank.run.curves.read_text().splitlines()] == [line]


def test_micro_batches_are_merged(one: One) -> None:
    rank = one()
    tensors = [normal(1), 3 * normal(2)]
    for x in tensors:
        rank.plant(x)
    scalars = rank.after()["scalars"]
    first, second = rank.statistics()
    assert scalars["amax/L0-fc1/input"] == max(first["abs_max"], second["abs_max"])
    signal, noise = (sum(s["fidelity"][k] for s in (first, second)) for k in ("signal", "noise"))
    assert scalars["sqnr_db/L0-fc1/input"] == decibel(signal, noise)
    assert scalars["sqnr_db/L0-fc1/input"] not in [
        s["fidelity"]["sqnr_db"] for s in (first, second)
    ]


def test_two_ranks_are_merged_and_rank_0_writes(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    other, leader = one(rank=1, num_ranks=2), one(rank=0, num_ranks=2)
    sent: list[Any] = []

    def gather(own: Any) -> list[Any]:
        sent.append(own)
        return list(reversed(sent))

    monkeypatch.setattr("quantexp.training.megatron.collectives.gather", gather)
    other.plant(5 * normal(3))
    leader.plant(normal(4))
    assert other.curves.after(1) is None
    assert leader.run.curves.read_text() == ""
    line = leader.after()
    scalars = line["scalars"]
    assert scalars["amax/L0-fc1/input"] == float((5 * normal(3)).abs().max())
    counts = from_json(line["histograms"]["log2_magnitude/L0-fc1/input"])
    assert counts.total == 2 * 256
    assert len(leader.run.curves.read_text().splitlines()) == 1


def test_iteration_that_is_not_captured_has_no_line(one: One) -> None:
    rank = one()
    assert rank.curves.after(3) is None
    assert rank.run.curves.read_text() == ""


def test_each_iteration_has_its_own_tensors(one: One) -> None:
    rank = one()
    for iteration, scale in ((1, 8.0), (2, 1.0)):
        rank.plant(scale * normal(1), iteration=iteration)
        amax = rank.after(iteration)["scalars"]["amax/L0-fc1/input"]
        assert amax == float((scale * normal(1)).abs().max())


def test_tensor_that_no_product_quantises_has_no_score(one: One) -> None:
    rank = one()
    rank.plant(normal(1), "output")
    line = rank.after()
    assert list(line["scalars"]) == ["amax/L0-fc1/output"]
    assert "fidelity" not in rank.statistics()[0]


def test_value_that_is_not_finite_is_left_out(one: One) -> None:
    rank = one()
    rank.plant(torch.full((2, 1, 64), math.nan, dtype=torch.bfloat16))
    assert rank.after() == {"iteration": 1, "scalars": {}, "histograms": {}}


def test_tensor_that_changed_before_it_was_counted_is_left_out(one: One) -> None:
    rank = one()
    x = normal(1)
    rank.plant(x)
    x.add_(1)
    assert rank.after()["scalars"] == {}


def test_tensor_without_a_curve_is_not_kept(one: One) -> None:
    rank = one("tracking.most_curves=1")  # that of the first module
    rank.plant(normal(1), "output")
    assert rank.after()["scalars"] == {}


def test_limit_is_logged_once(one: One, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        one("tracking.most_curves=100", rank=1, num_ranks=2)
        assert caplog.records == []
        one("tracking.most_curves=100")
    assert [record.getMessage() for record in caplog.records] == [
        "92 of 184 curves of captured statistics, of layer 0: tracking.most_curves allows no more layers"
    ]


@pytest.mark.slow
def test_trackers_of_a_training_have_the_statistics_of_its_capture(
    run_tiny_once: Callable[..., RunDir],
) -> None:
    """One micro-batch, so that no sum has another order."""
    words = ("training.iterations=4", "capture.every=2", "training.global_batch_size=2")
    run = run_tiny_once(*WORDS, *words)
    expected: dict[tuple[str, int], float] = {}
    for line in lines_of(run.tensors / STATISTICS):
        place = f"L{line['layer']}"
        place += "" if line["module"] == "attention" else f"-{line['module']}"
        found = line["statistics"]
        scores = found.get("fidelity") or {}
        for tag, value in (
            ("amax", found["abs_max"]),
            *((name, scores.get(name)) for name in ("sqnr_db", "underflow_share")),
        ):
            if value is not None:
                expected[f"{tag}/{place}/{line['tensor']}", line["iteration"]] = value
    assert {iteration for _, iteration in expected} == {2, 4}
    events = EventAccumulator(str(run.tensorboard), size_guidance={"tensors": 0}).Reload()
    found_values = {
        (tag, event.step): event.value
        for tag in events.Tags()["scalars"]
        if tag.startswith(("amax/", "sqnr_db/", "underflow_share/"))
        for event in events.Scalars(tag)
    }
    assert found_values.keys() == expected.keys()
    for key, value in found_values.items():
        assert value == pytest.approx(expected[key], rel=2**-24), key  # float32 in event files
