"""A desk that keeps its figures in memory, and captures of a small run to draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from quantexp.analysis.chapter import Desk, Problems, Source
from quantexp.analysis.measures.measured import Request, measure, of_statistics, usual_request
from quantexp.analysis.numerics.series import Run
from quantexp.analysis.pool import Pool
from quantexp.analysis.tensors.run_record import RunNames
from quantexp.capture.reader import Capture as Opened
from quantexp.capture.reader import CapturedTensor, open_capture
from quantexp.errors import CaptureError
from tests.analysis.captures import Capture, attention_formats, linear_formats


@dataclass
class MemoryDesk(Desk):
    """The desk that `quantexp draw` passes to a chapter, in this process, with the figures in memory."""

    out: Path
    formats: tuple[str, ...] = ("png",)
    pool: Pool = field(init=False)
    problems: Problems = field(init=False)
    console: Console = field(init=False)
    figures: dict[str, Figure] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    num_looks: int = 0
    #: Whether figures are laid out, as saving them does: it takes a second for ten of them.
    lays_out: bool = False

    def say(self, line: str) -> None:
        self.messages.append(line)

    def each(
        self, look: Callable[[CapturedTensor], Any], entries: Iterable[CapturedTensor]
    ) -> Iterator[tuple[CapturedTensor, Any]]:
        for entry in entries:
            self.num_looks += 1
            yield entry, look(entry)

    def save(self, figure: Figure, name: str) -> list[Path]:
        if self.lays_out:
            figure.draw_without_rendering()
        assert name not in self.figures, f"{name} is written twice"
        self.figures[name] = figure
        return [self.out / f"{name}.{kind}" for kind in self.formats]

    def write_text(self, name: str, text: str) -> Path:
        self.texts[name] = text
        return self.out / name


def source_of(capture: Capture, scheme: str | None = None) -> Source:
    """The capture as `draw` opens it."""
    opened = open_capture(capture.dir, statistics=True)
    names = RunNames(capture.run_dir.name, scheme=scheme)
    return of_entries(Source(capture.run_dir.name, opened, names), list(opened))


def of_entries(source: Source, entries: list[CapturedTensor]) -> Source:
    """The same source with these tensors alone, as `draw` measures them."""
    opened, request = Opened(source.capture.folder, entries), usual_request(entries)
    measures = []
    for entry in opened.with_values():
        with contextlib.suppress(CaptureError):
            measures.append(measure(entry, request))
    measures += [of_statistics(entry.metadata) for entry in opened.described()]
    return Source(source.label, opened, source.names, measures=tuple(measures))


def run_of(capture: Capture, *formats: str, scheme: str = "FA_linear_mxfp4") -> Run:
    """The measures of a capture."""
    entries = open_capture(capture.dir).with_values()
    tensors = tuple(measure(entry, Request(tuple(formats))) for entry in entries)
    return Run("a run", scheme, tensors)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """bf16 from a normal distribution."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values * scale).to(torch.bfloat16)


def add_run(
    capture: Capture,
    layers: int = 2,
    settings: dict[str, Any] | None = None,
    *,
    iterations: int = 1,
    ranks: int = 1,
    quant_type: str = "mxfp4",
) -> None:
    """A linear module and attention in every layer, both passes; `settings` is every slot's format, None is bf16."""
    of_linear = {} if settings is None else linear_formats(settings)
    of_attention = {} if settings is None else attention_formats(settings)
    for iteration in range(1, iterations + 1):
        for rank in range(ranks):
            for layer in range(layers):
                seed = 100 * iteration + 10 * layer + rank
                tensors = {
                    "input": normal(64, 1, 64, seed=seed),
                    "weight": normal(96, 64, seed=seed + 1, scale=0.02),
                    "output": normal(64, 1, 96, seed=seed + 2),
                    "grad_output": normal(64, 1, 96, seed=seed + 3, scale=2.0**-14),
                    "grad_input": normal(64, 1, 64, seed=seed + 4, scale=2.0**-16),
                }
                lines = [
                    capture.add(x, name, "fc1", layer, formats=of_linear, quant_type=quant_type)
                    for name, x in tensors.items()
                ]
                for name, heads in (("query", 4), ("key", 2), ("value", 2), ("grad_query", 4)):
                    x = normal(64, 1, heads, 32, seed=seed + 5)
                    lines.append(
                        capture.add(
                            x,
                            name,
                            "attention",
                            layer,
                            formats=of_attention,
                            quant_type=quant_type,
                        )
                    )
                for line in lines:
                    line |= {"iteration": iteration, "rank": rank}
    capture.write()
