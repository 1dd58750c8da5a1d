"""Command lines that nobody means: each gets one clean line or a plan of exactly what it says, in bounded time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantexp.cli import plan
from quantexp.config.compose import compose
from quantexp.schema import Experiment
from tests.hostile.answers import Tally, answer, check
from tests.hostile.held import lost, unaffected
from tests.hostile.overrides import BASE, MAKERS, of_a_verb

Cases = Iterator[random.Random]

#: Every command line that once ended with a traceback, without an answer, or in a run that was not the one written.
KNOWN = [
    ["quant=null"],
    ["-m", "training.seed=range(0,inf)"],
    ["-m", "training.lr=range(0,1,nan)"],
    ["training.start_from='" + r"\'" * 24_000],
    ["training=1.5"],
    ["+model.mla.yarn.factor=40"],
    ["~model=1.0"],
    ["hydra/output=[1,2]"],
    ["+launcher=[{}]"],
    ["launcher=slurm", "launcher.mem_gb=1e300"],
    ["launcher.timeout_min=1e300"],
    [f"training.lr={'9' * 400}"],
    [f"training.iterations={'9' * 400}"],
    [f"training.seed={'9' * 5000}"],
    [f"{'a' * 6000}=1"],
    [f"training.{'a' * 6000}=1"],
    [f"training.lr={'[' * 3000}{']' * 3000}"],
    [f"training.lr={'{a:' * 1000}1{'}' * 1000}"],
    ["training.name=a\x1b[31mb"],
    ["training.name=a\udce9b"],
    ["=1"],
    ["@=1"],
    ["~=1"],
    ["model.num_layers=1000000000"],
    ["model=deepseek2_lite", "model.num_layers=1000", "model.moe.num_experts=4096"],
    ["training.iterations=1000000000", "capture.iterations=['1-1000000000']"],
    ["-m", "training.seed=range(1,1000000000000)"],
    ["-m", "training.seed=range(0,100000)", "training.iterations=range(1,100000)"],
    ["-m", "training.lr=range(1,2,1e-300)"],
    ["-m", "training.lr=range(1,2,0)"],
    ["-m", "sweep.seeds=1000000000"],
    ["model/cut@model=anything"],
    ["quant.pv.dgrad_v.dO.window=???"],
    ["quant.rules=[{layers: [0], format: ???}]"],
    ["training.lr=1e38"],
    ["training.lr=1e-300"],
    ["model.mla={}"],
    ["hydra/launcher=basic"],
    ["hydra.mode=MULTIRUN"],
    ["hydra.runtime.choices={}"],
    ["launcher=slurm", "+launcher.sbatch.arr=1"],
    ["launcher=slurm", "launcher.srun_args=['--ntask=3']"],
]


@pytest.fixture(autouse=True)
def _alone(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / ".cache"))


@pytest.mark.parametrize("words", KNOWN, ids=lambda words: " ".join(words)[:40])
def test_command_line_that_was_answered_wrongly_is_refused_in_one_line(words: list[str]) -> None:
    refused = answer(["plan", *BASE, *words])
    check(refused, ends=[1])
    assert not list(Path.cwd().glob(".cache/quantexp/tracebacks/*"))


def test_no_override_ends_in_a_traceback_a_hang_or_another_run(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case goes through `quantexp plan`; an accepted one must hold each value as typed, and change something."""
    planned: list[Experiment] = []

    def recording(*arguments: object) -> Experiment:
        experiment = compose(*arguments)  # type: ignore[arg-type]
        planned.append(experiment)
        return experiment

    monkeypatch.setattr(plan, "compose", recording)
    plain = compose(BASE, None, {})
    tally = Tally()
    for source in cases:
        kind = source.choice([*MAKERS])
        words = MAKERS[kind](source)
        planned.clear()
        with tally.case(kind, words):
            answered = answer(["plan", *BASE, *words])
            check(answered)
            tally.accepted += answered.code == 0
            for experiment in planned:
                assert not lost(experiment, words)
                assert not unaffected(experiment, plain, words)
    tally.report()


def test_no_word_after_a_verb_ends_in_a_traceback_or_a_hang(cases: Cases) -> None:
    tally = Tally()
    for source in cases:
        words = of_a_verb(source)
        with tally.case(words[0], words):
            check(answer(words))
    tally.report()
