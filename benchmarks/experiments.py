"""What the shipped experiments gave, from their run folders: the table of docs/experiments.md.

    python benchmarks/experiments.py RUNS ... [--write]

RUNS are the folders of runs of one size. The table is printed, or with `--write` replaces the one on the page. The
section of each experiment states the rule that decides; `EXPERIMENTS` applies it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.floors import Floors
from quantexp.analysis.compare.noise import seed_floor
from quantexp.analysis.compare.side import Side, read_side
from quantexp.analysis.compare.verdicts import Verdict, conclude, judge, verdict_on
from quantexp.folders import conf_dir
from quantexp.runs.evaluation import is_evaluation, read_evaluation
from quantexp.runs.paths import RunDir

PAGE = Path(__file__).parent.parent / "docs" / "experiments.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
BF16 = "bf16"
#: A gap of this part of the loss counts as none.
NEAR = 0.005
#: The learning rates of mx_instability, at `small` and at `full`: eight times those of all other experiments.
HIGH_RATES = (1.6e-2, 4.8e-3)
REPRODUCED, REFUTED, OPEN = "reproduced", "refuted", "not resolved at this size"


def is_near(verdict: Verdict) -> str:
    """Whether a scheme's loss is that of bf16, or within 0.5% of it."""
    if verdict.interval is None:
        return OPEN
    if verdict.words == "inside the chaos floor":
        return REPRODUCED
    assert verdict.relative is not None
    level = verdict.mean / verdict.relative if verdict.relative else 0.0
    low, high = verdict.interval
    limit = NEAR * level
    if max(-low, high) <= limit:
        return REPRODUCED
    return REFUTED if low > limit or high < -limit else OPEN


def is_above(verdict: Verdict) -> str:
    """Whether a scheme's loss is above that of the other."""
    return {"above": REPRODUCED, "below": REFUTED}.get(verdict.words.partition(" ")[0], OPEN)


def is_below(verdict: Verdict) -> str:
    """Whether a scheme's loss is below that of the other."""
    return {"above": REFUTED, "below": REPRODUCED}.get(verdict.words.partition(" ")[0], OPEN)


@dataclass(frozen=True)
class Question:
    """One comparison of an experiment."""

    scheme: str
    against: str
    outcome: Callable[[Verdict], str]


@dataclass(frozen=True)
class Shipped:
    """An experiment of conf/experiment and its questions."""

    name: str
    claim: str
    questions: tuple[Question, ...]
    has_high_rate: bool = False
    #: Whether its questions are about evaluations of trained weights, not about trainings.
    is_evaluated: bool = False

    @property
    def schemes(self) -> set[str]:
        """The schemes that its file trains, with bf16, which `sweep.chaos` adds."""
        file = OmegaConf.load(conf_dir() / "experiment" / f"{self.name}.yaml")
        choices = file.hydra.sweeper.params.quant.split(",")
        return {BF16, *(choice.rpartition("/")[2] for choice in choices)}


EXPERIMENTS = (
    Shipped(
        "mxfp8_tracks_bf16",
        "MXFP8 tracks bf16",
        (Question("linear_mxfp8", BF16, is_near),),
    ),
    Shipped(
        "mxfp8_scale_rules",
        "floor is worse than rceil",
        (Question("linear_mxfp8_floor", "linear_mxfp8", is_above),),
    ),
    Shipped(
        "mxfp4_recipe",
        "MXFP4 is above bf16, the recipe closer",
        (
            Question("linear_mxfp4", BF16, is_above),
            Question("linear_mxfp4_sr_rht", "linear_mxfp4_backward", is_below),
        ),
    ),
    Shipped(
        "mxfp4_products",
        "MXFP4 hurts most in the weight gradient",
        (
            Question("linear_mxfp4_fprop", "linear_mxfp4_wgrad", is_below),
            Question("linear_mxfp4_dgrad", "linear_mxfp4_wgrad", is_below),
        ),
    ),
    Shipped(
        "hifp8_against_fp8",
        "HiF8 tracks bf16",
        (Question("linear_hifp8", BF16, is_near),),
    ),
    Shipped(
        "mx_instability",
        "MXFP8 with floor is unstable at a high learning rate",
        (
            Question("linear_mxfp8_floor", BF16, is_above),
            Question("linear_mxfp8_floor_fprop", "linear_mxfp8_floor", is_below),
            Question("linear_mxfp8_floor_weights", "linear_mxfp8_floor", is_below),
        ),
        has_high_rate=True,
    ),
    Shipped(
        "direct_cast",
        "A direct cast to MXFP4 loses, to MXFP6 and MXFP8 it does not",
        (
            Question("linear_mxfp4", BF16, is_above),
            Question("linear_mxfp6", "linear_mxfp4", is_below),
            Question("linear_mxfp8", "linear_mxfp4", is_below),
        ),
        is_evaluated=True,
    ),
)


def overall(outcomes: Sequence[str]) -> str:
    """The outcome of an experiment with several questions."""
    if REFUTED in outcomes:
        return REFUTED
    return REPRODUCED if set(outcomes) == {REPRODUCED} else OPEN


@dataclass(frozen=True)
class Answer:
    """The verdict on a question; beside it what two runs of bf16 differ by."""

    question: Question
    verdict: Verdict
    floors: Floors | None = None


def judged(sides: Sequence[Side], shipped: Shipped) -> list[Answer]:
    """The verdicts on an experiment's questions, none if runs are missing; other schemes have no part in them."""
    if shipped.is_evaluated:
        return evaluated(sides, shipped)
    chosen = [
        side
        for side in sides
        if side.scheme in shipped.schemes
        and not is_evaluation(side.run)
        and (side.config["training"]["lr"] in HIGH_RATES) == shipped.has_high_rate
    ]
    if {side.scheme for side in chosen} != shipped.schemes:
        return []
    comparison = compare(chosen)
    results: list[Answer] = []
    for question in shipped.questions:
        verdicts = judge(comparison, None, None if question.against == BF16 else question.against)
        results += [
            Answer(question, v, next(iter(verdicts.floors), None))
            for v in verdicts.schemes
            if v.label == question.scheme
        ]
    return results


def evaluated(sides: Sequence[Side], shipped: Shipped) -> list[Answer]:
    """The verdicts on evaluations, a number for each model; none if a scheme has no evaluation of some model."""
    losses: dict[str, dict[str, float]] = {BF16: {}}
    for side in sides:
        evaluation = read_evaluation(side.run) if is_evaluation(side.run) else None
        if evaluation is None:
            continue
        model, one = side.config["training"]["start_from"], evaluation["scheme"]
        losses.setdefault(side.scheme, {})[model] = float(one["loss"] or math.nan)
        losses[BF16][model] = float(one.get("bf16_loss") or math.nan)
    models = losses[BF16]
    named = {name for question in shipped.questions for name in (question.scheme, question.against)}
    if not models or any(losses.get(name, {}).keys() != models.keys() for name in named):
        return []
    level = sum(models.values()) / len(models)
    drafts = []
    for question in shipped.questions:
        own, others = losses[question.scheme], losses[question.against]
        gaps = {i: own[model] - others[model] for i, model in enumerate(models)}
        drafts.append(verdict_on(question.scheme, question.against, gaps, level, (1, 1)))
    floors = Floors(BF16, None, 0, seed_floor(list(models.values())), len(models))
    verdicts = conclude(drafts, [floors] * len(drafts))
    # An evaluation has no perturbed runs, which the words may ask for.
    verdicts = tuple(replace(v, words=v.words.replace(" or sweep.chaos=1", "")) for v in verdicts)
    return [Answer(*pair) for pair in zip(shipped.questions, verdicts, strict=True)]


def table(sides: Sequence[Side]) -> str:
    """The results of all experiments in Markdown."""
    lines = [
        "| experiment | comparison | seeds | gap, nats | 95% interval | relative | verdict | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    chaos = ""
    for shipped in EXPERIMENTS:
        results = judged(sides, shipped)
        if not results:
            lines.append(f"| [{shipped.claim}](#{shipped.name}) | | | | | | not run yet | |")
            continue
        end = overall([answer.question.outcome(answer.verdict) for answer in results])
        for i, answer in enumerate(results):
            question, verdict = answer.question, answer.verdict
            low, high = verdict.interval or (float("nan"), float("nan"))
            first = f"[{shipped.claim}](#{shipped.name})" if i == 0 else ""
            lines.append(
                f"| {first} | `{question.scheme}` to `{question.against}` | {len(verdict.seeds)} | "
                f"{verdict.mean:+.4f} | {low:+.4f} to {high:+.4f} | {verdict.relative or 0:+.2%} | "
                f"{verdict.words} | {f'**{end}**' if i == 0 else ''} |"
            )
        floors = results[0].floors
        if floors is not None and floors.chaos is not None and not shipped.has_high_rate:
            chaos = (
                f"By last bits of the initial weights, two runs of bf16 differ by more than {floors.chaos:.4f} nats\n"
                f"in one of 20 cases ({floors.num_chaos} pairs). The last run ended on {_last_day(sides)}."
            )
    lines += ["", chaos] if chaos else []
    return "\n".join(lines)


def _last_day(sides: Sequence[Side]) -> str:
    ends = [side.status.finished for side in sides if side.status and side.status.finished]
    return max(ends)[:10] if ends else "an unknown day"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description="The results of the shipped experiments.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    arguments = parser.parse_args(words)
    files = [file for root in arguments.runs for file in sorted(root.glob("*/config.yaml"))]
    sides = [read_side(RunDir(file.parent)) for file in files]
    shown = table([side for side in sides if side.state == "completed"])
    if not arguments.write:
        sys.stdout.write(shown + "\n")
        return
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{shown}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
