"""How often compare calls chance a difference: bf16 against bf16 whose initial weights differ in last bits.

    python benchmarks/false_alarms.py [--seeds 100] [--chaos 1] [--iterations 300] [--trials 20000] [--figure FILE]
        [key=value ...]
    python benchmarks/false_alarms.py --shapes [--trials 2000]

A tiny model is trained at every seed, and again with `training.chaos` 1 to `--chaos`. A trial chooses three, four or
six of the seeds, and for each one of its perturbed runs, and asks for Student's p-value of their gaps. There is no
difference to find, so a p-value below 5% is a false alarm, of which there should be 5%. Trials share runs: the
standard error beside the share says how far other seeds would give another one. The figure has the share of trials
whose p-value is at most each level, which should be that level.

`--shapes` trains nothing. It draws gaps of mean zero from noise of several shapes, and prints how often Student's
p-value is below 5%, and how often the verdict of `quantexp compare` is `above` or `below`: without perturbed runs, with
three pairs of them that have the same noise, and with three whose noise is a third, a fifth and a tenth of it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TINY = [
    *("training=fast", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=128"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.seq_length=64", "training.micro_batch_size=2", "training.global_batch_size=4"),
    *("training.lr=3e-3", "training.warmup_iterations=4", "quant=bf16", "capture=off"),
    *("analysis.auto=false", "tracking.tensorboard=false"),
]
#: Seeds of one comparison.
SIZES = (3, 4, 6)
#: Of `--shapes`: noise of mean zero, of shape [seeds].
SHAPES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "Student's t of 3": lambda rng, n: rng.standard_t(3, size=n),
    "exponential": lambda rng, n: rng.exponential(size=n) - 1,
    "log-normal": lambda rng, n: np.exp(rng.normal(size=n)) - math.exp(0.5),
    "1 or -1": lambda rng, n: rng.choice([-1, 1], n) + 1e-4 * rng.normal(size=n),
    "0.9 once in ten": lambda rng, n: (
        np.where(rng.random(n) < 0.1, 0.9, -0.1) + 1e-4 * rng.normal(size=n)
    ),
}
SHAPE_SIZES = (3, 4, 5, 6, 8, 12)
#: Pairs of perturbed runs, and how much larger than theirs the noise of the scheme is.
REFERENCES = ((0, 1), (3, 1), (3, 3), (3, 5), (3, 10))


def losses(words: Sequence[str]) -> list[float]:
    """The losses of a run in this process."""
    from quantexp.config.compose import compose
    from quantexp.launch.attempt import open_run
    from quantexp.runs.device import device_class
    from quantexp.runs.metrics import loss_curve, read_metrics
    from quantexp.training.worker import Worker

    with tempfile.TemporaryDirectory() as root:
        experiment = compose([*TINY, *words, f"paths.root={root}"])
        device = device_class(experiment.launcher)
        with open_run(experiment, device, ["false_alarms.py"]) as (opened, _):
            if Worker(opened.run, experiment).run():
                raise RuntimeError(opened.run.status.read_text())
        return list(loss_curve(read_metrics(opened.run)).losses)


def ends(arguments: argparse.Namespace) -> Any:
    """The mean loss of the last tenth of each run, [seed, chaos]; chaos 0 is unperturbed."""
    late = max(1, arguments.iterations // 10)
    table = np.empty((arguments.seeds, arguments.chaos + 1))
    for seed in range(arguments.seeds):
        for chaos in range(arguments.chaos + 1):
            words = [*arguments.words, f"training.seed={seed + 1}", f"training.chaos={chaos}"]
            words.append(f"training.iterations={arguments.iterations}")
            table[seed, chaos] = np.mean(losses(words)[-late:])
        sys.stderr.write(f"seed {seed + 1} of {arguments.seeds}\n")
    return table


def trials(table: Any, size: int, number: int) -> tuple[list[Any], Any]:
    """The verdicts, not concluded, on so many seeds, and the seeds of each, [trials, size]."""
    from quantexp.analysis.compare.verdicts import verdict_on

    rng = np.random.default_rng(size)
    verdicts: list[Any] = []
    all_seeds = np.stack([rng.choice(len(table), size, replace=False) for _ in range(number)])
    for seeds in all_seeds:
        chosen = rng.integers(1, table.shape[1], size)
        gaps = table[seeds, chosen] - table[seeds, 0]
        by_seed = dict(enumerate(map(float, gaps)))
        verdicts.append(verdict_on("perturbed", "bf16", by_seed, 1.0, (1, 1)))
    return verdicts, all_seeds


def shapes(number: int) -> None:
    """Print the false alarms of noise of each shape."""
    from quantexp.analysis.compare.floors import Floors
    from quantexp.analysis.compare.noise import LEVEL, floor_of
    from quantexp.analysis.compare.verdicts import conclude, verdict_on

    heads = [f"{pairs} pairs, x{ratio}" if pairs else "no pairs" for pairs, ratio in REFERENCES]
    sys.stdout.write(f"{'noise':18}seeds  p < 5%  {'  '.join(heads)}\n")
    for name, draw_noise in SHAPES.items():
        for size in SHAPE_SIZES:
            rng = np.random.default_rng(size)
            by_p, alarms = 0, [0] * len(REFERENCES)
            for _ in range(number):
                gaps = draw_noise(rng, size)
                draft = verdict_on("A", "bf16", dict(enumerate(map(float, gaps))), 1.0, (1, 1))
                by_p += draft.p_value is not None and draft.p_value < LEVEL
                for i, (pairs, ratio) in enumerate(REFERENCES):
                    floor = floor_of([float(x) / ratio for x in draw_noise(rng, pairs)])
                    (verdict,) = conclude([draft], [Floors("bf16", floor, pairs, None, 1)])
                    alarms[i] += verdict.words in ("above bf16", "below bf16")
            shares = (f"{n / number:{len(head)}.1%}" for n, head in zip(alarms, heads, strict=True))
            sys.stdout.write(f"{name:18}{size:5}  {by_p / number:6.1%}  {'  '.join(shares)}\n")


def standard_error(alarms: Any, seeds: Any, num_seeds: int) -> float:
    """Of the share of alarms, as seeds are chance: that of a U-statistic (Hoeffding 1948, section 5).

    It is m / sqrt(n) times the standard deviation, over the n seeds, of the share in the trials that have a seed; what
    the number of these trials adds to that deviation is subtracted.
    """
    number, size = seeds.shape
    with_seed = np.bincount(seeds.ravel(), minlength=num_seeds)
    shares = np.bincount(seeds.ravel(), np.repeat(alarms, size), minlength=num_seeds) / with_seed
    of_trials = alarms.var() * num_seeds / (number * size)
    variance = max(0.0, float(shares.var(ddof=1) - of_trials)) / num_seeds
    return float(size) * math.sqrt(variance)


def draw(p_values: dict[int, list[float]], file: Path) -> None:
    """The distribution of p-values of each size of comparison, beside that of no difference."""
    from quantexp.analysis.style import (
        BLUE,
        GREY,
        ORANGE,
        VERMILLION,
        dress,
        new_figure,
        save_figure,
    )

    figure = new_figure(4.6, 4.2)
    ax = figure.subplots()
    dress(ax, "False alarms of compare", "level", "share of comparisons with p at most the level")
    ax.plot((0, 1), (0, 1), color=GREY, linewidth=1.2, label="no difference: p is the level")
    for (size, values), colour in zip(p_values.items(), (BLUE, ORANGE, VERMILLION), strict=True):
        x = np.sort(values)
        ax.plot(x, np.arange(1, len(x) + 1) / len(x), color=colour, label=f"{size} seeds")
    ax.axvline(0.05, color=GREY, linewidth=0.8, linestyle=":")
    ax.legend(frameon=False, fontsize=8)
    figure.subplots_adjust(left=0.14, right=0.97, top=0.92, bottom=0.13)
    save_figure(figure, file.with_suffix(""), ("png",))


def main() -> None:
    """Print the shares of false alarms."""
    from quantexp.analysis.compare.noise import LEVEL

    parser = argparse.ArgumentParser(description="False alarms of compare.")
    parser.add_argument("words", nargs="*", metavar="key=value", help="of the trainings")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--chaos", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--trials", type=int, default=20000)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--shapes", action="store_true", help="of noise that is drawn")
    arguments = parser.parse_args()
    if arguments.shapes:
        shapes(arguments.trials)
        return
    table = ends(arguments)
    gaps = (table[:, 1:] - table[:, :1]).ravel()
    sys.stdout.write(
        f"{len(gaps)} pairs of {arguments.seeds} seeds; a perturbed run differs by {gaps.std():.4f} nats (standard "
        f"deviation) at a loss of {table[:, 0].mean():.3f}, seeds by {table[:, 0].std(ddof=1):.4f}\n"
    )
    p_values = {}
    for size in SIZES:
        verdicts, seeds = trials(table, size, arguments.trials)
        alarms = np.array([v.p_value < LEVEL for v in verdicts], dtype=float)
        p_values[size] = [v.p_value for v in verdicts]
        error = standard_error(alarms, seeds, arguments.seeds)
        sys.stdout.write(
            f"{size} seeds: {alarms.mean():.1%} false alarms, standard error {error:.1%}\n"
        )
    if arguments.figure:
        draw(p_values, arguments.figure)


if __name__ == "__main__":
    main()
