"""Searches the units of a scheme for the culprit of a trouble, by replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from quantexp.analysis.bisect.ddmin import Subset
from quantexp.analysis.bisect.measures import Measure, Observation, loss_margin
from quantexp.analysis.bisect.result import Result
from quantexp.analysis.bisect.scheme_file import override, write_scheme
from quantexp.analysis.bisect.search import Found, Observed, Verdict, search
from quantexp.analysis.bisect.trouble import Step, Trouble, steps_of
from quantexp.cli.bisect_replays import run_all
from quantexp.launch.replays import Origin, declared_of, gradient_of, replay
from quantexp.quant.units import Unit, units_of, working_rules
from quantexp.runs.gradients import read_gradients
from quantexp.runs.paths import RunDir
from quantexp.schema import Aspect, Experiment, Rule

#: The default deviations, where the run's trigger has none.
_DEVIATIONS = 10.0
#: The default threshold as a share of the whole scheme's distance.
_HALF = 0.5


@dataclass
class Replays:
    """The replays of a search: what they quantise, and what was observed."""

    origin: Origin
    last: int
    units: list[Unit]
    measure: Measure
    console: Console
    observations: dict[Subset, Observation] = field(default_factory=dict)

    def experiment(self, quantised: Subset) -> Experiment:
        """The replay that quantises these units and no others."""
        rules = self.rules(frozenset(range(len(self.units))) - quantised)
        if self.measure.name == "gradient":
            return gradient_of(self.origin, [], rules)
        return replay(self.origin, self.last, rules)

    def rules(self, in_bf16: Subset) -> list[Rule]:
        """The rules that turn these units to bf16."""
        return working_rules(self.units[unit] for unit in sorted(in_bf16))

    def run(self, subsets: Sequence[Subset]) -> list[RunDir]:
        """Run replays and observe them."""
        runs = run_all([self.experiment(each) for each in subsets], self.console)
        for subset, run in zip(subsets, runs, strict=True):
            self.observations[subset] = self._observation(run)
        return runs

    def observe(self, subsets: Sequence[Subset]) -> list[Observed]:
        """What a search needs of these replays; the first call has the controls."""
        runs = self.run(subsets)
        bf16 = self.observations[Subset()]
        return [
            Observed(
                subset,
                self.measure.is_trouble(self.observations[subset], bf16),
                self.measure.words(self.observations[subset], bf16),
                str(run.root),
            )
            for subset, run in zip(subsets, runs, strict=True)
        ]

    def _observation(self, run: RunDir) -> Observation:
        if self.measure.name != "gradient":
            return Observation(tuple(steps_of(run)))
        gradients = read_gradients(run)
        assert gradients is not None
        distance = gradients["passes"][0]["whole"]["distance"]
        loss = gradients["passes"][0]["loss"]
        step = Step(gradients["iteration"], math.nan if loss is None else loss)
        return Observation((step,), math.inf if distance is None else distance)


def find(
    origin: Origin,
    last: int,
    aspects: Sequence[Aspect],
    trouble: Trouble,
    bound: float | None,
    folder: Path,
    console: Console,
) -> tuple[Result, Replays]:
    """Search, and write the scheme that keeps the culprit in bf16; `bound` None derives it.

    Raises:
        RunError: a replay did not complete, or the bound cannot be derived.
    """
    own = steps_of(origin.run)
    history = tuple(step for step in own if step.iteration <= origin.start)
    units = units_of(declared_of(origin, last), aspects)
    everything = frozenset(range(len(units)))
    replays = Replays(origin, last, units, Measure(trouble.measure, 0.0, history), console)
    if bound is None and trouble.measure == "gradient":
        replays.run([everything, Subset()])
        bound = _HALF * replays.observations[everything].distance
    elif bound is None:
        bound = _derived(origin, own, trouble.measure)
    replays.measure = Measure(trouble.measure, bound, history)
    found = search(
        len(units),
        replays.observe,
        lambda each: replays.measure.is_bf16_troubled(replays.observations[each.quantised]),
    )
    result = _result(
        origin, trouble, replays, found, _control(own, replays.observations[everything])
    )
    if found.verdict is not Verdict.FOUND:
        return result, replays
    rules = replays.rules(found.cure)
    quant = origin.experiment.quant
    kept = ", ".join(result.named(found.cure))
    file = write_scheme(quant, rules, kept, folder)
    word = override(quant, rules)
    return _result(origin, trouble, replays, found, result.control, str(file), word), replays


def _derived(origin: Origin, own: Sequence[Step], measure: str) -> float:
    if measure == "loss":
        return loss_margin(own, origin.start)
    if measure == "grad_norm":
        return origin.experiment.capture.trigger.deviations or _DEVIATIONS
    return 0.0


def curves_of(replays: Replays, result: Result) -> dict[str, Sequence[Step]]:
    """The losses of the replays that decide, by name; empty if only gradients were compared."""
    if replays.measure.name == "gradient":
        return {}
    everything, found = frozenset(range(len(replays.units))), result.found
    wanted = {"whole scheme": everything, "bf16": Subset()}
    if found.enough:
        wanted["culprit alone quantised"] = found.enough[0]
        wanted["culprit alone in bf16"] = everything - found.cure
    return {name: replays.observations[each].steps for name, each in wanted.items()}


def _result(
    origin: Origin,
    trouble: Trouble,
    replays: Replays,
    found: Found,
    control: str,
    file: str | None = None,
    word: str | None = None,
) -> Result:
    return Result(
        run=origin.run.root.name,
        scheme=str(origin.experiment.quant.name),
        start=origin.start,
        last=replays.last,
        trouble=trouble,
        measure=replays.measure,
        units=tuple(map(str, replays.units)),
        found=found,
        control=control,
        file=file,
        override=word,
    )


def _control(own: Sequence[Step], whole: Observation) -> str:
    """How the losses of the replay with nothing changed compare with the run's own."""
    recorded = {step.iteration: step for step in own}
    pairs = [(recorded[s.iteration], s) for s in whole.steps if s.iteration in recorded]
    if not pairs:
        return "the run has no losses of the replayed iterations to compare with"
    other = [here.iteration for there, here in pairs if not _is_same(there, here)]
    if other:
        return f"the replay with nothing changed has other losses than the run, first at iteration {other[0]}"
    return f"the replay with nothing changed has the run's {len(pairs)} losses, bit for bit"


def _is_same(one: Step, other: Step) -> bool:
    same = one.loss == other.loss or (math.isnan(one.loss) and math.isnan(other.loss))
    return same and one.is_left_out == other.is_left_out
