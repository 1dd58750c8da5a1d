"""Plans a run from the configuration alone: precision map, parameters, memory, bytes to capture, commands.

Memory is as `quantexp.memory.footprint` counts it. Quantisation here is emulation: operands lie on the format's grid
but are stored in the working dtype, so it saves neither memory nor time; what packed hardware formats would hold is
given beside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quantexp.capture.select.budget import price
from quantexp.capture.select.curves import choose_curves
from quantexp.cli.plan_backend import BackendPlan, backend_plan, recipes_by_module
from quantexp.cli.plan_layout import LayoutPlan, layout_plan
from quantexp.cli.plan_state import state_bytes
from quantexp.config.environment import environment_lines
from quantexp.config.evaluation import maps_of
from quantexp.config.in_force import idle_rules
from quantexp.errors import DataError
from quantexp.extra import Service, service
from quantexp.launch.backend import launcher_of
from quantexp.launch.duration import duration, work
from quantexp.launch.identity import folder_name, identity
from quantexp.launch.recorded import root_of
from quantexp.launch.refusal import missing_for_backend
from quantexp.launch.reuse import skip_or_rerun_reason
from quantexp.memory.footprint import fullest_rank
from quantexp.memory.room import misfit, never, room_of
from quantexp.model.checkpoints import checkpoint_bytes, checkpoints_at_once
from quantexp.model.label import describe_model
from quantexp.model.sizes import (
    element_bytes,
    num_linear_parameters,
    num_micro_batches_each,
    num_padding_parameters,
    num_parameters,
    output_shape,
    shapes_by_layer,
)
from quantexp.quant.outside_products import (
    state_records,
)
from quantexp.quant.precision import Entry, quantises_output
from quantexp.quant.records import entry_record
from quantexp.quant.rules import changes, condition_words
from quantexp.quant.sites import FPROP_W
from quantexp.runs.device import device_class
from quantexp.runs.paths import RunDir
from quantexp.schema import (
    Experiment,
    MemoryCheck,
    ModelConfig,
    QuantConfig,
    TrainingConfig,
)
from quantexp.training.tracking.trackers import destinations


@dataclass(frozen=True)
class Plan:
    """The output of `quantexp plan --json`."""

    model: str
    dataset: str
    scheme: str
    #: What the variables of the old scripts that are set stand for.
    from_environment: list[str]
    #: Whether it evaluates given weights without training.
    evaluates: bool
    #: What it runs besides; no part of work and time.
    tasks: list[str]
    #: What was changed in the model, and its size; and the working precision.
    model_label: str
    precision: str
    #: plain, fused or tiled.
    attention: str
    #: Without Megatron's padding of the vocabulary.
    parameters: int
    #: Processes, and the micro-batches of every global batch that each takes part in.
    num_processes: int
    num_micro_batches_each: int
    layout: LayoutPlan
    padding_parameters: int
    #: Of the fullest rank.
    memory_gb_per_gpu: float
    #: The parts of it, in units of 1e9 bytes.
    memory_parts_gb: dict[str, float]
    #: The memory available to a process, here or in the requested job, None if the request does not state it; and the
    #: changes that make the run fit if it does not.
    room_gb: float | None
    to_fit: str | None
    #: Whether the run is refused where it does not fit: check, ignore, or a number of GB.
    memory: str
    #: What the linear weights of the precision map hold here, and would hold in the declared formats on hardware.
    linear_weight_bytes: int
    packed_weight_bytes: int
    #: The same of Adam's moments of all parameters, over all processes.
    moment_bytes: int
    packed_moment_bytes: int
    #: The same of the master weights.
    master_bytes: int
    packed_master_bytes: int
    capture_bytes: int
    #: Files with values, and tensors of which statistics are kept.
    capture_tensors: int
    capture_statistics: int
    #: pt or safetensors.
    capture_store: str
    #: Curves of captured statistics for trackers, those beyond the limit, and the layers of the former.
    curves: int
    curves_left_out: int
    curve_layers: list[int]
    #: The chosen statistics without a curve.
    curves_missing: list[str]
    #: Iterations of the ring, its host memory over all processes, and the values of a dossier on disk.
    ring: int | None
    ring_bytes: int
    dossier_bytes: int
    #: What the checkpoints take that are there at once, and how many they are at most.
    checkpoint_bytes: int
    checkpoints: int
    tflop_per_iteration: float
    #: Of the whole training: optimizer steps, tokens, work.
    iterations: int
    tokens: int
    tflop: float
    #: The estimated training time on this machine, without start and figures, and the measured rate of products in the
    #: working precision that it follows from; None for a job that runs elsewhere, on a GPU without free memory, or if
    #: the run does not fit.
    time_s: float | None
    product_gflop_per_s: float | None
    #: Each with `recipe`, if Transformer Engine multiplies the module.
    precision_map: list[dict[str, object]]
    #: What Transformer Engine makes of the run; None if it is neither the backend nor asked for.
    backend: BackendPlan | None
    #: Iterations at which rules change the map; the map above is the first one's.
    map_changes_at: list[int]
    #: The conditions of rules that are not in force before the run's metrics meet them, in words.
    conditions: list[str]
    #: The rules that are in force in none of the run's iterations, in words.
    idle_rules: str | None
    #: Why the run is skipped, or why a completed one runs again; None for any other.
    earlier: str | None
    #: Each concurrent run's share of this machine; empty for a single run, or if a cluster decides.
    slots: list[str]
    #: What the dataset still lacks, or the machine, if anything.
    missing: str | None
    #: tracker -> what it receives.
    tracking: dict[str, str]
    commands: list[list[str]]
    #: The batch script of a job; None on this machine.
    script: str | None

    @property
    def blockers(self) -> list[str]:
        """The reasons why the run cannot start, one in a line."""
        refused = None if self.starts_anyway else self.to_fit
        return [reason for reason in (self.missing, refused) if reason is not None]

    @property
    def starts_anyway(self) -> bool:
        """Whether the run starts where it does not fit."""
        return self.memory == MemoryCheck.ignore.value


def make_plan(
    experiment: Experiment,
    fast: Callable[[], Experiment | None] = never,
    gpu: object | None = None,
) -> Plan:
    """The plan of an experiment, without its time; reads no data, and uses devices only to find their size.

    Args:
        experiment: what would run.
        fast: composes the same run under `training=fast`.
        gpu: the GPU of `device_of`, which Transformer Engine would have; None is the one of the run's own machine.
    """
    model, training = experiment.model, experiment.training
    evaluates = experiment.evaluate.only
    maps = maps_of(experiment)
    entries = [entry for module in maps[0].values() for entry in module.entries()]
    fullest = fullest_rank(experiment, maps)
    parts = fullest.parts_gb
    room = room_of(experiment)
    too_large = misfit(experiment, room, maps, fast)
    done = work(experiment)
    captured = price(experiment, maps)
    checkpoints, curves = checkpoints_at_once(experiment), choose_curves(experiment)
    missing, folder = _folder(experiment)
    skipped, again = skip_or_rerun_reason(experiment, RunDir(Path(folder)))
    lacks = missing_for_backend(experiment) if gpu is None else None
    launched = launcher_of(experiment.launcher.kind).plan(experiment, Path(folder))
    ring_price = service(Service.RING_PRICE)
    ring_bytes, dossier_bytes = ring_price(experiment, maps[0]) if ring_price else (0, 0)
    return Plan(
        model=model.name,
        dataset=str(experiment.dataset.label),
        scheme=str(experiment.quant.name),
        from_environment=environment_lines(os.environ),
        evaluates=evaluates,
        tasks=list(experiment.evaluate.tasks),
        model_label=describe_model(model),
        precision=training.precision.value,
        attention=training.attention.value,
        parameters=num_parameters(model),
        num_processes=experiment.launcher.num_processes,
        num_micro_batches_each=num_micro_batches_each(experiment),
        layout=layout_plan(experiment, fullest),
        padding_parameters=num_padding_parameters(model),
        memory_gb_per_gpu=round(sum(parts.values()), 3),
        memory_parts_gb={name: round(value, 3) for name, value in parts.items()},
        room_gb=None if room is None else round(room.gb, 3),
        to_fit=None if too_large is None else str(too_large),
        memory=_memory_word(experiment),
        linear_weight_bytes=_linear_parameters(model, experiment.quant) * element_bytes(training),
        packed_weight_bytes=_packed_bytes(entries, model, training),
        **state_bytes(experiment),
        capture_bytes=captured.num_bytes,
        capture_tensors=captured.tensors,
        capture_statistics=captured.statistics,
        capture_store=experiment.capture.store.value,
        curves=len(curves.curves),
        curves_left_out=curves.num_left_out,
        curve_layers=curves.layers,
        curves_missing=[each.value for each in curves.missing],
        ring=experiment.capture.ring,
        ring_bytes=ring_bytes,
        dossier_bytes=dossier_bytes,
        checkpoint_bytes=checkpoints * checkpoint_bytes(experiment),
        checkpoints=checkpoints,
        tflop_per_iteration=done.flop / done.iterations / 1e12,
        iterations=done.iterations,
        tokens=done.tokens,
        tflop=done.flop / 1e12,
        time_s=None,
        product_gflop_per_s=None,
        precision_map=_entries(experiment, entries) + _outside_products(experiment),
        backend=backend_plan(experiment, gpu),
        map_changes_at=[1]
        if evaluates
        else [i for i in changes(experiment.quant) if i <= training.last_iteration],
        conditions=[
            f"quant.rules[{index}] follows an iteration in which {condition_words(rule.when)}"
            for index, rule in enumerate(experiment.quant.rules)
            if rule.when is not None
        ],
        idle_rules=idle_rules(experiment),
        earlier=skipped or again,
        slots=launched.slots,
        missing="; ".join(filter(None, (missing, launched.missing, lacks))) or None,
        tracking=destinations(experiment.tracking, RunDir(Path(folder))),
        commands=[launched.command],
        script=launched.script,
    )


def with_time(plan: Plan, experiment: Experiment) -> Plan:
    """The plan of an experiment with its time here; this may measure the machine."""
    is_refused = plan.to_fit is not None and not plan.starts_anyway
    takes = None if is_refused else duration(experiment)
    if takes is None:
        return plan
    rate = float(f"{takes.gflop_per_s:.3g}")
    return replace(plan, time_s=round(takes.seconds, 1), product_gflop_per_s=rate)


def _entries(experiment: Experiment, entries: list[Entry]) -> list[dict[str, object]]:
    """The entries of the map as JSON, those of a module that Transformer Engine multiplies with its recipe."""
    recipes = recipes_by_module(experiment)
    return [
        entry_record(entry) | ({"recipe": recipes[entry.module]} if entry.module in recipes else {})
        for entry in entries
    ]


def _memory_word(experiment: Experiment) -> str:
    gb = experiment.memory_gb
    return str(experiment.memory.value) if gb is None else f"{gb:g}"


def _folder(experiment: Experiment) -> tuple[str | None, str]:
    """What is missing, and the run's folder (without its hash if data is missing)."""
    root = root_of(experiment)
    try:
        content = identity(experiment, device_class(experiment.launcher))
    except DataError as error:
        names = (experiment.model.name, experiment.dataset.name, experiment.quant.name)
        return str(error), str(root / ("_".join(map(str, names)) + "-<hash8>"))
    return None, str(root / (experiment.paths.run or folder_name(experiment, content)))


def _linear_parameters(model: ModelConfig, quant: QuantConfig) -> int:
    output = output_shape(model).count if quantises_output(quant) else 0
    return num_linear_parameters(model) + output


def _packed_bytes(entries: list[Entry], model: ModelConfig, training: TrainingConfig) -> int:
    """The linear weights in the forward product's declared formats, block scales included."""
    shapes = shapes_by_layer(model)
    total = 0.0
    for entry in entries:
        if entry.slot != FPROP_W:
            continue
        count = shapes[entry.module.layer][entry.module.name].count
        total += count * _bits_each(entry, training) / 8
    return round(total)


def _bits_each(entry: Entry, training: TrainingConfig) -> float:
    spec = entry.spec
    if not spec.quantised:
        return 8.0 * element_bytes(training)
    return spec.fmt.bits_each(spec.block)


def _outside_products(experiment: Experiment) -> list[dict[str, object]]:
    """What a training rounds outside of products, as entries of the map."""
    return [] if experiment.evaluate.only else state_records(experiment.quant)
