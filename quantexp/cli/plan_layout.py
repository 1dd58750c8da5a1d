"""The layout of a planned run: its sizes, the fullest rank, what ranks hold and send, and what differs by it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from quantexp.config.auto_layout import candidates, is_chosen
from quantexp.memory.communication import communication_bytes
from quantexp.memory.footprint import RankMemory
from quantexp.memory.part import Part
from quantexp.model.layout import Layout
from quantexp.quant.alignment import unaligned_slots
from quantexp.schema import Experiment
from quantexp.terminal.units import human_bytes

#: Rows of the table of candidates.
_SHOWN = 10


@dataclass(frozen=True)
class LayoutPlan:
    """The part of `quantexp plan --json` about the layout."""

    name: str
    #: Ranks of each kind of group, and chunks of layers a stage.
    data: int
    tensor: int
    sequence: bool
    context: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    expert_tensor: int
    #: The first of the ranks that need most memory, and what they have.
    fullest_rank: int
    fullest_has: str
    #: Parameters of that rank, with the padding of the vocabulary.
    parameters_a_rank: int
    #: Micro-batches whose activations that rank keeps at once.
    micro_batches_in_flight: float
    #: Kind of group -> the most bytes that a rank sends in a step.
    communication_bytes: dict[str, int]
    #: Slots whose blocks fall otherwise than in one process, and groups that span nodes.
    notes: list[str]
    #: What `parallel=auto` chose from, the chosen one first; empty for any other layout.
    candidates: list[dict[str, object]]


def layout_plan(experiment: Experiment, fullest: RankMemory) -> LayoutPlan:
    """The layout of an experiment; `fullest` is its fullest rank."""
    layout, part = Layout.of(experiment), fullest.part
    return LayoutPlan(
        name=experiment.parallel.name,
        data=layout.data,
        tensor=layout.tensor,
        sequence=layout.sequence,
        context=layout.context,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.chunks,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        fullest_rank=part.stage * (layout.num_processes // layout.pipeline),
        fullest_has=_has(experiment, part),
        parameters_a_rank=part.parameters(experiment.model).total,
        micro_batches_in_flight=part.chunks_in_flight / layout.chunks,
        communication_bytes=communication_bytes(experiment),
        notes=_notes(experiment, layout),
        candidates=_candidates(experiment),
    )


def _candidates(experiment: Experiment) -> list[dict[str, object]]:
    if not is_chosen(experiment.parallel):
        return []
    keys = ("tensor", "context", "pipeline", "virtual_pipeline", "expert")
    return [
        {
            **{key: getattr(one.parallel, key) for key in keys},
            "memory_gb": round(one.memory_gb, 3),
            "communication_bytes": one.communication_bytes,
            "idle": round(one.idle, 4),
            "cost_s": round(one.cost_s, 4),
        }
        for one in candidates(experiment)
    ]


def candidates_table(plan: LayoutPlan) -> Table:
    """The cheapest layouts that `parallel=auto` chose from."""
    shown, number = plan.candidates[:_SHOWN], len(plan.candidates)
    table = Table(
        title=f"layouts that fit: {len(shown)} of {number}", title_justify="left", box=None
    )
    headings = (
        "tensor",
        "context",
        "pipeline",
        "chunks",
        "expert",
        "memory",
        "sends",
        "idle",
        "cost",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in shown:
        sizes = list(one.values())[:5]
        sent = one["communication_bytes"]
        assert isinstance(sent, dict)
        cells = (
            f"{one['memory_gb']:.1f} GB",
            human_bytes(sum(sent.values())),
            f"{one['idle']:.1%}",
            f"{one['cost_s']:.3g} s",
        )
        table.add_row(*map(str, sizes), *cells)
    return table


def _has(experiment: Experiment, part: Part) -> str:
    if part.layout.pipeline == 1:
        return "all ranks alike"
    layers = len(part.layout.stage_layers(experiment.model.num_layers, part.stage))
    words = [f"stage {part.stage} of {part.layout.pipeline}, {layers} layers"]
    words += ["the embedding"] if part.is_first else []
    words += ["the output layer"] if part.is_last else []
    return ", ".join(words)


def _notes(experiment: Experiment, layout: Layout) -> list[str]:
    launcher = experiment.launcher
    per_node = launcher.num_processes // launcher.nodes
    notes = [
        f"parallel.{key}={size}: its groups span nodes of {per_node} processes, so every layer waits for the network"
        for key, size in (("tensor", layout.tensor), ("expert_tensor", layout.expert_tensor))
        if size > 1 and per_node % size
    ]
    if unaligned := unaligned_slots(experiment):
        slots = "; ".join(map(str, unaligned))
        notes.append(f"blocks fall otherwise than in one process (parallel.unaligned): {slots}")
    return notes


def layout_lines(plan: LayoutPlan, num_processes: int, micro_batches: int) -> list[tuple[str, str]]:
    """The lines of a printed plan about the processes, each with its heading."""
    is_divided = plan.tensor * plan.context * plan.pipeline * plan.expert > 1
    if not is_divided:
        words = "data parallel: each holds the whole model and takes"
        lines = [
            (
                "processes",
                f"{num_processes}, {words} {micro_batches} micro-batches of every iteration",
            )
        ]
    else:
        lines = [
            ("processes", f"{num_processes}: {_sizes(plan)}; {micro_batches} micro-batches each"),
            (
                "fullest rank",
                f"{plan.fullest_rank} ({plan.fullest_has}): {plan.parameters_a_rank:,} parameters, "
                f"{plan.micro_batches_in_flight:g} micro-batches in flight",
            ),
        ]
    sent = ", ".join(f"{k} {human_bytes(n)}" for k, n in plan.communication_bytes.items())
    lines.append(("sends", f"{sent} a rank and step, at most"))
    return [*lines, *(("note", note) for note in plan.notes)]


def _sizes(plan: LayoutPlan) -> str:
    """`data 2 x tensor 4 (sequence) x pipeline 2 (2 chunks each); expert 8 x expert_tensor 1`."""
    tensor = f"tensor {plan.tensor}" + (" (sequence)" if plan.sequence else "")
    chunks = f" ({plan.virtual_pipeline} chunks each)" if plan.virtual_pipeline > 1 else ""
    sizes = {
        f"data {plan.data}": plan.data,
        tensor: plan.tensor,
        f"context {plan.context}": plan.context,
        f"pipeline {plan.pipeline}{chunks}": plan.pipeline,
    }
    words = " x ".join(word for word, size in sizes.items() if size > 1) or "data 1"
    if plan.expert == 1:
        return words
    return f"{words}; experts: expert {plan.expert} x expert_tensor {plan.expert_tensor}"
