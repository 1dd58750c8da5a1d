"""What would run, from the configuration alone: precision map, parameters, memory, bytes to capture, commands.

Memory is as `quantexp.memory.footprint` counts it. Quantisation here is emulation: operands lie on the format's grid
but are stored in the working dtype, so it saves neither memory nor time; what packed hardware formats would hold is
given beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantexp_launchers.local.processes import command
from quantexp_launchers.local.slots import slots_for
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quantexp.capture.select.budget import price
from quantexp.errors import DataError, RunError
from quantexp.formats.table import get_format
from quantexp.launch.attempt import root_of
from quantexp.launch.duration import duration, in_words, work
from quantexp.launch.identity import folder_name, identity
from quantexp.launch.product_rate import rate_in_words
from quantexp.memory.footprint import memory_parts_gb
from quantexp.memory.room import misfit, never, room_of
from quantexp.model.checkpoints import checkpoint_bytes, iterations_saved
from quantexp.model.decoder import is_routed, shapes_by_layer
from quantexp.model.label import describe_model
from quantexp.model.sizes import (
    element_bytes,
    num_linear_parameters,
    num_micro_batches_each,
    num_padding_parameters,
    num_parameters,
)
from quantexp.quant.label import describe_format, describe_scheme
from quantexp.quant.precision import Entry, changes, declared_maps, entry_record
from quantexp.quant.sites import Product, Site
from quantexp.quant.slots import WORKING
from quantexp.runs.device import device_class
from quantexp.runs.paths import RunDir
from quantexp.schema import (
    Experiment,
    LauncherKind,
    MemoryCheck,
    ModelConfig,
    TrainingConfig,
)
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from quantexp.terminal.units import human_bytes
from quantexp.training.tracking.trackers import destinations

#: What values are kept in, in a person's words.
_STORES = {"pt": ".pt files", "safetensors": "safetensors shards"}
#: The ways to attention, in the same.
_PATHS = {
    "plain": "plain: product by product, T x T of scores and probabilities kept for each head",
    "fused": "fused: torch's kernel on quantised q, k and v, nothing of T x T kept",
    "tiled": "tiled: product by product of a tile of queries at a time, nothing of T x T kept",
}
#: Why the time of a run on this machine is not known.
GPU_IS_FULL = "the GPU has no memory free for a measurement"

_MAP = (
    Column("layers", shrink=Shrink.WRAP),
    Column("modules", shrink=Shrink.WRAP),
    Column("slot"),
    Column("held as", shrink=Shrink.WRAP, min_width=24),
)


@dataclass(frozen=True)
class Plan:
    """What `quantexp plan --json` prints."""

    model: str
    dataset: str
    scheme: str
    #: What was changed in the model, and its size; and the working precision.
    model_label: str
    precision: str
    #: plain, fused or tiled.
    attention: str
    #: Without Megatron's padding of the vocabulary.
    parameters: int
    #: Processes that share every global batch, and the micro-batches of it that each takes.
    num_processes: int
    num_micro_batches_each: int
    padding_parameters: int
    memory_gb_per_gpu: float
    #: The parts of it, in units of 1e9 bytes.
    memory_parts_gb: dict[str, float]
    #: What a process may have here, or of what SLURM is asked for, None where the request does not say; and what would
    #: make the run fit if it does not.
    room_gb: float | None
    to_fit: str | None
    #: Whether the run is refused where it does not fit: check, or ignore.
    memory: str
    #: What the decoder's linear weights hold here, and would hold in the declared formats on hardware.
    linear_weight_bytes: int
    packed_weight_bytes: int
    capture_bytes: int
    #: Files with values, and tensors of which statistics are kept.
    capture_tensors: int
    capture_statistics: int
    #: pt or safetensors.
    capture_store: str
    #: What the models take that are saved on the way and at the end, and how many they are.
    checkpoint_bytes: int
    checkpoints: int
    tflop_per_iteration: float
    #: Of the whole training: optimizer steps, tokens, work.
    iterations: int
    tokens: int
    tflop: float
    #: How long the training takes on this machine, without start and figures, and the measured rate of products in the
    #: working precision that says so; None of a job that runs elsewhere, or on
    #: a GPU without free memory.
    time_s: float | None
    product_gflop_per_s: float | None
    precision_map: list[dict[str, object]]
    #: Iterations at which rules change the map; the map above is the first one's.
    map_changes_at: list[int]
    #: What each of the runs that go on at once has of this machine; empty where there is one alone, or SLURM decides.
    slots: list[str]
    #: What the dataset still lacks, or the machine, if anything.
    missing: str | None
    #: Who is told about the run: tracker -> what is written where.
    tracking: dict[str, str]
    commands: list[list[str]]
    #: The batch script that is submitted, under SLURM.
    script: str | None


def make_plan(experiment: Experiment, fast: Callable[[], Experiment | None] = never) -> Plan:
    """The plan of an experiment; touches neither data nor devices beyond asking what is there and how fast it is.

    Args:
        experiment: what would run.
        fast: composes the same run under `training=fast`.
    """
    model, training = experiment.model, experiment.training
    maps = declared_maps(model, experiment.quant)
    entries = [entry for module in maps[0].values() for entry in module.entries()]
    parts = memory_parts_gb(experiment, maps)
    room = room_of(experiment)
    too_large = misfit(experiment, room, maps, fast)
    done, takes = work(experiment), duration(experiment)
    captured = price(experiment, maps)
    saved = iterations_saved(experiment.checkpoint, training.iterations)
    missing, folder = _folder(experiment)
    slots, too_small = _slots(experiment)
    return Plan(
        model=model.name,
        dataset=str(experiment.dataset.label),
        scheme=str(experiment.quant.name),
        model_label=describe_model(model),
        precision=training.precision.value,
        attention=training.attention.value,
        parameters=num_parameters(model),
        num_processes=experiment.launcher.num_processes,
        num_micro_batches_each=num_micro_batches_each(experiment),
        padding_parameters=num_padding_parameters(model),
        memory_gb_per_gpu=round(sum(parts.values()), 3),
        memory_parts_gb={name: round(value, 3) for name, value in parts.items()},
        room_gb=None if room is None else round(room.gb, 3),
        to_fit=None if too_large is None else str(too_large),
        memory=experiment.memory.value,
        linear_weight_bytes=num_linear_parameters(model) * element_bytes(training),
        packed_weight_bytes=_packed_bytes(entries, model, training),
        capture_bytes=captured.num_bytes,
        capture_tensors=captured.tensors,
        capture_statistics=captured.statistics,
        capture_store=experiment.capture.store.value,
        checkpoint_bytes=len(saved) * checkpoint_bytes(experiment),
        checkpoints=len(saved),
        tflop_per_iteration=done.flop / done.iterations / 1e12,
        iterations=done.iterations,
        tokens=done.tokens,
        tflop=done.flop / 1e12,
        time_s=None if takes is None else round(takes.seconds, 1),
        product_gflop_per_s=None if takes is None else float(f"{takes.gflop_per_s:.3g}"),
        precision_map=[entry_record(entry) for entry in entries],
        map_changes_at=[i for i in changes(experiment.quant) if i <= training.iterations],
        slots=slots,
        missing="; ".join(filter(None, (missing, too_small))) or None,
        tracking=destinations(experiment.tracking, RunDir(Path(folder))),
        commands=[_command(experiment, Path(folder))],
        script=_script(experiment, Path(folder)),
    )


def _command(experiment: Experiment, folder: Path) -> list[str]:
    if experiment.launcher.kind is LauncherKind.local:
        return command(folder, experiment.launcher.num_processes)
    from quantexp_launchers.slurm.submit import planned

    return ["sbatch", str(planned(experiment, folder).folder / "JOB_submission.sh")]


def _script(experiment: Experiment, folder: Path) -> str | None:
    if experiment.launcher.kind is LauncherKind.local:
        return None
    from quantexp_launchers.slurm.executor import script
    from quantexp_launchers.slurm.submit import planned

    return script(planned(experiment, folder))


def _folder(experiment: Experiment) -> tuple[str | None, str]:
    """What is missing, and the run's folder (its hash open while data is missing)."""
    root = root_of(experiment)
    try:
        content = identity(experiment, device_class(experiment.launcher))
    except DataError as error:
        names = (experiment.model.name, experiment.dataset.name, experiment.quant.name)
        return str(error), str(root / ("_".join(map(str, names)) + "-<hash8>"))
    return None, str(root / folder_name(experiment, content))


def _slots(experiment: Experiment) -> tuple[list[str], str | None]:
    """What each of the runs at once has, or why the machine is too small for so many."""
    launcher = experiment.launcher
    if launcher.kind is not LauncherKind.local or (launcher.max_parallel or 1) == 1:
        return [], None
    try:
        return [str(slot) for slot in slots_for([experiment])], None
    except RunError as error:
        return [], str(error)


def _packed_bytes(entries: list[Entry], model: ModelConfig, training: TrainingConfig) -> int:
    """The decoder's linear weights in the forward product's declared formats, block scales included."""
    shapes = shapes_by_layer(model)
    total = 0.0
    for entry in entries:
        if (entry.site, entry.product, entry.name) != (Site.LINEAR, Product.FPROP, "w"):
            continue
        count = shapes[entry.module.layer][entry.module.name].count
        total += count * _bits_each(entry, training) / 8
    return round(total)


def _bits_each(entry: Entry, training: TrainingConfig) -> float:
    operand = entry.operand
    if not operand.quantised:
        return 8.0 * element_bytes(training)
    scale_bits = 8 / operand.block if operand.block else 0.0
    return get_format(operand.format).element.bits + scale_bits


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it."""
    return asdict(plan)


def print_plan(plan: Plan, console: Console) -> None:
    """The plan for a person: the precision map of one layer where all are alike."""
    table = Facts(console)
    padding = f" and {plan.padding_parameters:,} of padding" if plan.padding_parameters else ""
    table.add_row("model", f"{escape(plan.model_label)} ({plan.parameters:,}{padding})")
    table.add_row("data", escape(plan.dataset))
    table.add_row("scheme", escape(describe_scheme(plan.scheme, plan.precision)))
    table.add_row("attention", _PATHS[plan.attention])
    if plan.num_processes > 1:
        table.add_row(
            "processes",
            f"{plan.num_processes}, data parallel: each holds the whole model and takes "
            f"{plan.num_micro_batches_each} micro-batches of every iteration",
        )
    if plan.slots:
        table.add_row("at once", f"{len(plan.slots)} runs of a sweep: {'; '.join(plan.slots)}")
    parts = ", ".join(
        f"{name.replace('_', ' ')} {value:.2f}"
        for name, value in plan.memory_parts_gb.items()
        if value >= 0.005  # what would be printed as 0.00
    )
    table.add_row("memory", f"{plan.memory_gb_per_gpu:.1f} GB a process: {parts}")
    table.add_row(
        "",
        "emulation: quantised operands are held in the working dtype, which saves neither memory nor time; linear "
        f"weights take {human_bytes(plan.linear_weight_bytes)}, packed on hardware "
        f"{human_bytes(plan.packed_weight_bytes)}",
    )
    table.add_row(
        "work",
        f"{plan.tflop_per_iteration:,.2f} TFLOP an iteration; {plan.iterations:,} iterations: {tflop(plan.tflop)}, "
        f"{plan.tokens:,} tokens",
    )
    table.add_row("time", time_in_words(plan))
    table.add_row(
        "capture",
        f"{human_bytes(plan.capture_bytes)} of values in {plan.capture_tensors:,} tensors"
        + (f" ({_STORES[plan.capture_store]})" if plan.capture_tensors else "")
        + f", statistics of {plan.capture_statistics:,}",
    )
    if plan.checkpoints:
        table.add_row(
            "checkpoints", f"{human_bytes(plan.checkpoint_bytes)} in {plan.checkpoints} of them"
        )
    for name, destination in plan.tracking.items():
        table.add_line(name, destination)
    table.add_line("command", " ".join(plan.commands[0]))
    table.print()
    console.print(precision_table(plan, console.width))
    if plan.script is not None:
        console.print(Rule("the job's script", align="left"))
        console.print(plan.script, markup=False, soft_wrap=True)
    for line in blockers(plan):
        console.print(f"[bold red]will not start:[/] {escape(line)}", soft_wrap=True)
    if plan.to_fit is not None and plan.memory == MemoryCheck.ignore.value:
        console.print(
            f"[yellow]starts although it does not fit (memory=ignore):[/] {escape(plan.to_fit)}",
            soft_wrap=True,
        )


def blockers(plan: Plan) -> list[str]:
    """Why the run would not start, each reason in a line."""
    refused = plan.to_fit if plan.memory == MemoryCheck.check.value else None
    return [reason for reason in (plan.missing, refused) if reason is not None]


def tflop(number: float) -> str:
    """Work in TFLOP, PFLOP from 10,000 of them on."""
    if number < 10_000:
        return f"{number:,.1f} TFLOP"
    return f"{number / 1000:,.0f} PFLOP"


def time_in_words(plan: Plan) -> str:
    """How long the training takes here, and what was measured for it."""
    if plan.time_s is None or plan.product_gflop_per_s is None:
        why = GPU_IS_FULL if plan.script is None else "it does not run on this machine"
        return f"not known: {why}"
    return (
        f"about {in_words(plan.time_s)} of training on this machine "
        f"(measured: {rate_in_words(plan.product_gflop_per_s)} in {plan.precision} products)"
    )


def precision_table(plan: Plan, width: int) -> Table:
    """The precision map, layers and modules with the same slots on one row."""
    rows: list[list[str | Text]] = []
    by_slot: dict[tuple[str, str], dict[str, list[int]]] = {}
    for entry in plan.precision_map:
        slot = f"{entry['site']}.{entry['product']}.{entry['operand']}"
        modules = by_slot.setdefault((slot, _held_as(entry, plan.precision)), {})
        modules.setdefault(str(entry["module"]), []).append(int(str(entry["layer"])))
    for (slot, held_as), modules in by_slot.items():
        by_layers: dict[str, list[str]] = {}
        for module, layers in modules.items():
            by_layers.setdefault(_ranges(layers), []).append(module)
        for ranges, names in by_layers.items():
            rows.append([ranges, escape(" ".join(_experts_together(names))), slot, held_as])
    table = fitted_table(_MAP, rows, width, "precision map").table
    if len(plan.map_changes_at) > 1:
        table.caption = f"rules change this map at iterations {plan.map_changes_at[1:]}"
    return table


def _experts_together(names: list[str]) -> list[str]:
    """`expert[0-63]-fc1` for the same module of many experts."""
    together: dict[str, list[int]] = {}
    for name in names:
        expert, _, part = name.rpartition("-")
        if is_routed(name):
            together.setdefault(part, []).append(int(expert.removeprefix("expert")))
    others = [name for name in names if not is_routed(name)]
    return [*others, *(f"expert[{_ranges(n)}]-{part}" for part, n in together.items())]


def _held_as(entry: dict[str, object], precision: str) -> str:
    if entry["format"] == WORKING:
        return describe_format(WORKING, precision)
    if entry["reuse"]:
        return f"{entry['format']}, the forward copy"
    parts = [str(entry["format"])]
    if entry["block"]:
        parts.append(f"blocks of {entry['block']} along {entry['axis']}")
    if entry["scale_rule"]:
        parts.append(str(entry["scale_rule"]))
    parts += _scaling_words(entry)
    if entry["rounding"] == "stochastic":
        parts.append("rounded stochastically")
    if entry.get("pre_scale"):
        parts.append("3/4 before and 4/3 after")
    if entry.get("clip_gradient"):
        parts.append("no gradient where it saturates")
    if entry.get("hadamard"):
        parts.append(f"{entry['hadamard']} Hadamard in blocks of {entry['hadamard_block']}")
    return ", ".join(parts)


def _scaling_words(entry: dict[str, object]) -> list[str]:
    if entry["scaling"] is None:
        return []
    if entry["scaling"] == "none":
        return ["unscaled"]
    how = str(entry["scaling"])
    if entry.get("window"):
        how += f" over {entry['window']} iterations"
    words = [f"one scale a tensor ({how})"]
    return [*words, f"amax to {entry['amax_target']:g}"] if entry["amax_target"] else words


def _ranges(layers: list[int]) -> str:
    """`0-15` for neighbours, else the list."""
    if len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))
