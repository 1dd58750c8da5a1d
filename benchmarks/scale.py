"""What large runs take: memory, messages, captures and records, from the formulas that `quantexp plan` uses.

    python benchmarks/scale.py [--write]

Prints the tables of docs/parallel.md; `--write` replaces them there. Nothing is trained. The bytes of a line of a
record are those of a small run, which tests/test_scale.py measures again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantexp.capture.select.budget import price
from quantexp.config.compose import compose
from quantexp.memory.communication import communication_bytes
from quantexp.memory.footprint import fullest_rank
from quantexp.model.layout import Layout
from quantexp.quant.precision import declared_maps
from quantexp.schema import Experiment, ParallelConfig
from quantexp.terminal.units import human_bytes

PAGE = Path(__file__).parent.parent / "docs" / "parallel.md"
#: The tables lie between these lines of the page.
BEGIN, END = "<!-- tables: python benchmarks/scale.py --write -->\n", "<!-- end of tables -->\n"
#: Bytes of a line of manifest.jsonl, statistics.jsonl and metrics.jsonl.
MANIFEST_LINE, STATISTICS_LINE, METRICS_LINE = 2_380, 2_265, 413
#: Bytes of a slot in precision.json and provenance.json together, and of all else in these, in config.yaml and in
#: status.json.
ENTRY, RECORDS = 800, 24_000
#: Bytes per second of a parallel file system, for all ranks together.
RATES = (10e9, 100e9, 500e9)
ITERATIONS, RUNS = 100_000, 10_000

_JOB = ("launcher=slurm", "launcher.gpus_per_node=8", "training.attention=tiled", "memory=80")
CASES = {
    "llama31-8b, 64 nodes x 8": (
        *("model=llama31-8b", "launcher.nodes=64", "launcher.num_processes=512"),
        *("training.global_batch_size=1024", "parallel=auto"),
    ),
    "deepseek2_lite, 8 nodes x 8": (
        *("model=deepseek2_lite", "launcher.nodes=8", "parallel=deepseek2_lite_64x80"),
        "training.global_batch_size=512",
    ),
}


@dataclass(frozen=True)
class Capture:
    """A capture of one micro-batch of each data-parallel rank in one iteration."""

    num_bytes: int
    tensors: int
    statistics: int


def composed(words: tuple[str, ...], capture: str) -> Experiment:
    """A case that captures one micro-batch of its first iteration."""
    only = (f"capture={capture}", "capture.iterations=[1]", "capture.collect_micro_batches=1")
    return compose([*words, *_JOB, *only, "quant=FA_linear_mxfp8"], None, {})


def captured(experiment: Experiment) -> Capture:
    """What all ranks capture: as much as data-parallel ranks that hold the whole model."""
    launcher = dataclasses.replace(experiment.launcher, num_processes=Layout.of(experiment).data)
    size = price(dataclasses.replace(experiment, launcher=launcher, parallel=ParallelConfig()))
    return Capture(size.num_bytes, size.tensors, size.statistics)


def tables() -> str:
    """The tables of the page."""
    return "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    full = {name: composed(words, "tensors") for name, words in CASES.items()}
    stats = {name: composed(words, "stats") for name, words in CASES.items()}
    yield from _table("", list(CASES), _rows(list(full.values()), list(stats.values())))
    yield ""
    records = list(map(_record_bytes, full.values()))
    metrics = METRICS_LINE * ITERATIONS
    rows = [
        [f"metrics over {ITERATIONS:,} iterations", *(human_bytes(metrics) for _ in records)],
        ["configuration, provenance, status, precision", *map(human_bytes, records)],
        [f"both of {RUNS:,} runs", *(human_bytes(RUNS * (metrics + n)) for n in records)],
    ]
    yield from _table("records of a run", list(CASES), rows)


def _record_bytes(experiment: Experiment) -> int:
    """A run's records but the metrics: most is the precision map, in precision.json and in the provenance."""
    (declared,) = declared_maps(experiment.model, experiment.quant)
    return RECORDS + ENTRY * sum(len(module.slots) for module in declared.values())


def _rows(full: list[Experiment], stats: list[Experiment]) -> Iterator[list[str]]:
    layouts, ranks = map(Layout.of, full), list(map(fullest_rank, full))
    sent = list(map(communication_bytes, full))
    whole, summaries = list(map(captured, full)), list(map(captured, stats))
    yield ["layout", *map(_sizes, layouts)]
    yield ["memory of the fullest rank", *(f"{rank.gb:.1f} GB" for rank in ranks)]
    for kind in dict.fromkeys(kind for one in sent for kind in one):
        yield [f"a rank sends in a step: {kind}", *(human_bytes(one.get(kind, 0)) for one in sent)]
    yield ["full capture of an iteration", *(human_bytes(one.num_bytes) for one in whole)]
    for rate in RATES:
        times = (f"{one.num_bytes / rate:.3g} s" for one in whole)
        yield [f"written at {human_bytes(round(rate))}/s", *times]
    yield ["its tensors", *(f"{one.tensors:,}" for one in whole)]
    yield ["its manifest", *(human_bytes(one.tensors * MANIFEST_LINE) for one in whole)]
    lines = [one.statistics * STATISTICS_LINE for one in summaries]
    yield ["statistics of an iteration", *map(human_bytes, lines)]
    every = (human_bytes(n * ITERATIONS) for n in lines)
    yield [f"statistics of each of {ITERATIONS:,} iterations", *every]


def _sizes(layout: Layout) -> str:
    sizes = {
        "data": layout.data,
        "tensor": layout.tensor,
        "context": layout.context,
        "pipeline": layout.pipeline,
        "chunks": layout.chunks,
        "expert": layout.expert,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _table(
    first: str, headings: list[str], rows: Iterator[list[str]] | list[list[str]]
) -> Iterator[str]:
    yield _row([first, *headings])
    yield _row(["---"] * (1 + len(headings)))
    yield from map(_row, rows)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables, or write them into the page."""
    text = tables()
    sys.stdout.write(text)
    if sys.argv[1:] == ["--write"]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
