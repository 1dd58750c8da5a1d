"""Searches the units of a scheme for the culprit of a trouble, by replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from quantexp.extras.bisect.measures import Measure, Observation, loss_margin
from quantexp.extras.bisect.replays import declared_of, gradient_of, replay
from quantexp.extras.bisect.result import Chance, Result, override, write_scheme
from quantexp.extras.bisect.rounds import run_all
from quantexp.extras.bisect.search import Found, Observed, Subset, Verdict, search
from quantexp.extras.bisect.trouble import Step, Trouble, steps_of
from quantexp.launch.replays import Origin
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

    def experiment(self, quantised: Subset, chaos: int = 0) -> Experiment:
        """The replay that quantises these units and no others; from moved weights, if `chaos` is not 0."""
        rules = self.rules(frozenset(range(len(self.units))) - quantised)
        if self.measure.name == "gradient":
            return gradient_of(self.origin, [], rules)
        return replay(self.origin, self.last, rules, chaos=chaos)

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

    def chance(self, number: int) -> Chance:
        """The whole scheme and bf16, each this many times from weights moved in last bits."""
        ends = frozenset(range(len(self.units))), Subset()
        pairs = [(subset, chaos) for subset in ends for chaos in range(1, number + 1)]
        runs = run_all([self.experiment(*pair) for pair in pairs], self.console)
        seen = {pair: (run, self._observation(run)) for pair, run in zip(pairs, runs, strict=True)}

        def observed(subset: Subset, chaos: int) -> Observed:
            run, observation = seen[subset, chaos]
            # bf16 is held against itself from the weights that are not moved.
            bf16 = seen[Subset(), chaos][1] if subset else self.observations[Subset()]
            is_trouble = self.measure.is_trouble(observation, bf16)
            return Observed(
                subset, is_trouble, self.measure.words(observation, bf16), str(run.root)
            )

        scheme, bf16 = ([observed(s, n) for s, n in pairs if s == subset] for subset in ends)
        return Chance(tuple(scheme), tuple(bf16))

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
    chance: int,
    folder: Path,
    console: Console,
) -> tuple[Result, Replays]:
    """Search, and write the scheme that keeps the culprit in bf16.

    Args:
        origin: the run and its checkpoint.
        last: the last replayed iteration.
        aspects: what is turned off together.
        trouble: what is looked for.
        bound: of the measure; None derives it.
        chance: replays from moved weights, of the scheme and of bf16 each; none of a gradient.
        folder: of the results.
        console: of the progress.

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
    if chance and trouble.measure != "gradient":
        result = replace(result, chance=replays.chance(chance))
    rules = replays.rules(found.cure)
    quant = origin.experiment.quant
    kept = ", ".join(result.named(found.cure))
    file = write_scheme(quant, rules, kept, folder)
    word = override(quant, rules)
    return replace(result, file=str(file), override=word), replays


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
