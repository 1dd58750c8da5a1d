"""Prints the plan of one run, with the precision map of one layer if all layers are alike."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quantexp.capture.select.curves import curves_in_words
from quantexp.cli.plan_backend import backend_lines, layer_ranges
from quantexp.cli.plan_layout import candidates_table, layout_lines
from quantexp.cli.plan_record import Plan
from quantexp.folders import shell_line
from quantexp.formats.definitions.files import format_of_record
from quantexp.formats.definitions.python import python_name, source_file
from quantexp.formats.spec import LEFT_OUT, PRE_SCALE
from quantexp.formats.types import Family, Format, Of
from quantexp.formats.words import block_scale_words, block_words, code_words, element_words
from quantexp.launch.duration import about
from quantexp.launch.machine_rates import rate_in_words
from quantexp.model.decoder import EMBEDDING, OUTPUT, is_routed, layer_words
from quantexp.quant.label import describe_format, describe_scheme, factor_words
from quantexp.quant.outside_products import OPTIMIZER, PULL, RESET, SMOOTH
from quantexp.quant.records import part_words
from quantexp.quant.slots import WORKING
from quantexp.schema import Backend
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from quantexp.terminal.units import human_bytes

#: What values are kept in, in a person's words.
_STORES = {"pt": ".pt files", "safetensors": "safetensors shards"}
#: The ways to attention, in the same.
_PATHS = {
    "plain": "plain: product by product, T x T of scores and probabilities kept for each head",
    "fused": "fused: torch's kernel on quantised q, k and v, nothing of T x T kept",
    "tiled": "tiled: product by product of a tile of queries at a time, nothing of T x T kept",
}
#: How operands are held, by backend.
_OF_BACKEND = {
    Backend.emulated.value: "emulation: quantised operands are held in the working dtype, which saves neither memory "
    "nor time",
    Backend.transformer_engine.value: "Transformer Engine multiplies packed operands of linear layers; the memory "
    "above is the emulation's, and weights stay in the working dtype",
    Backend.te_emulated.value: "emulation inside Transformer Engine's linear layers: operands are held in the working "
    "dtype, which saves neither memory nor time",
}
#: What follows for the embedding where the output layer is quantised.
_TIED = "tied to the output layer's weight: it looks up the quantised weight"
_UNTIED = "not tied to the output layer's weight: it stays in high precision"
#: Why the time of a run on this machine is not known.
GPU_IS_FULL = "the GPU has no memory free for a measurement"

_MAP = (
    Column("layers", shrink=Shrink.WRAP),
    Column("modules", shrink=Shrink.WRAP),
    Column("slot"),
    Column("held as", shrink=Shrink.WRAP, min_width=24),
)


def show(plan: Plan, console: Console, complete: Callable[[Plan], Plan]) -> None:
    """Print what prevents the run, the precision map, and then the `complete` plan, which may take a measurement."""
    for line in plan.blockers:
        console.print(f"[bold red]will not start:[/] {escape(line)}", soft_wrap=True)
    if plan.to_fit is not None and plan.starts_anyway:
        console.print(
            f"[yellow]starts although it does not fit (memory=ignore):[/] {escape(plan.to_fit)}",
            soft_wrap=True,
        )
    console.print(precision_table(plan, console.width))
    plan = complete(plan)
    table = Facts(console)
    padding = f" and {plan.padding_parameters:,} of padding" if plan.padding_parameters else ""
    table.add_row("model", f"{escape(plan.model_label)} ({plan.parameters:,}{padding})")
    table.add_row("data", escape(plan.dataset))
    table.add_row("scheme", escape(describe_scheme(plan.scheme, plan.precision)))
    for line in plan.from_environment:
        table.add_row("", escape(line))
    if plan.idle_rules is not None:
        table.add_row("rules", f"[yellow]{escape(plan.idle_rules)}[/]")
    for line in _own_formats(plan):
        table.add_row("format", escape(line))
    for heading, line in backend_lines(plan.backend):
        table.add_row(heading, escape(line))
    table.add_row("attention", _PATHS[plan.attention])
    if OUTPUT in (modules := {entry["module"] for entry in plan.precision_map}):
        table.add_row("embedding", _TIED if EMBEDDING in modules else _UNTIED)
    if plan.num_processes > 1:
        lines = layout_lines(plan.layout, plan.num_processes, plan.num_micro_batches_each)
        for heading, line in lines:
            table.add_row(heading, escape(line))
    if plan.slots:
        table.add_row("at once", f"{len(plan.slots)} runs of a sweep: {'; '.join(plan.slots)}")
    parts = ", ".join(
        f"{name.replace('_', ' ')} {value:.2f}"
        for name, value in plan.memory_parts_gb.items()
        if value >= 0.005  # what would be printed as 0.00
    )
    table.add_row("memory", f"{plan.memory_gb_per_gpu:.1f} GB a process: {parts}")
    how = _OF_BACKEND.get(plan.backend.name) if plan.backend is not None else None
    table.add_row(
        "",
        f"{how or _OF_BACKEND[Backend.emulated.value]}; linear weights take "
        f"{human_bytes(plan.linear_weight_bytes)}, packed on hardware "
        f"{human_bytes(plan.packed_weight_bytes)}{_state(plan)}",
    )
    table.add_row(
        "work",
        f"{tflop(plan.tflop_per_iteration)} an iteration; {plan.iterations:,} iterations: {tflop(plan.tflop)}, "
        f"{plan.tokens:,} tokens",
    )
    table.add_row("time", time_in_words(plan))
    if plan.tasks:
        words = "in bf16 and under the scheme, which work and time above leave out"
        table.add_row("tasks", f"{', '.join(plan.tasks)}: {words}")
    if not plan.evaluates:
        table.add_row("capture", _captured(plan))
        if plan.ring is not None:
            table.add_row("ring", _ring(plan))
    if plan.curves or plan.curves_missing:
        words = curves_in_words(
            plan.curves, plan.curves_left_out, plan.curve_layers, plan.curves_missing
        )
        table.add_row("curves", words)
    if plan.checkpoints:
        table.add_row(
            "checkpoints", f"{human_bytes(plan.checkpoint_bytes)} in {plan.checkpoints} of them"
        )
    for name, destination in plan.tracking.items():
        table.add_line(name, destination)
    if plan.earlier is not None:
        table.add_row("earlier", escape(plan.earlier))
    table.add_line("command", shell_line(plan.commands[0]))
    table.print()
    if plan.layout.candidates:
        console.print(candidates_table(plan.layout))
    if plan.script is not None:
        console.print(Rule("the job's script", align="left"))
        console.print(plan.script, markup=False, soft_wrap=True)


def _state(plan: Plan) -> str:
    """What Adam's moments and the master weights take, those that the scheme rounds."""
    parts = (
        ("Adam's moments", plan.moment_bytes, plan.packed_moment_bytes),
        ("master weights", plan.master_bytes, plan.packed_master_bytes),
    )
    return "".join(
        f"; {name} {human_bytes(taken)}, packed {human_bytes(packed)}"
        for name, taken, packed in parts
        if packed != taken and not plan.evaluates
    )


def _captured(plan: Plan) -> str:
    return (
        f"{human_bytes(plan.capture_bytes)} of values in {plan.capture_tensors:,} tensors"
        + (f" ({_STORES[plan.capture_store]})" if plan.capture_tensors else "")
        + f", statistics of {plan.capture_statistics:,}"
    )


def _ring(plan: Plan) -> str:
    return (
        f"statistics of {plan.ring:,} iterations, {human_bytes(plan.ring_bytes)} of host memory; "
        f"a dossier has {human_bytes(plan.dossier_bytes)} of values"
    )


def tflop(number: float) -> str:
    """The work in TFLOP; in PFLOP from 10,000 TFLOP, in GFLOP and MFLOP below a tenth of the larger unit."""
    if number >= 10_000:
        return f"{number / 1000:,.0f} PFLOP"
    in_unit = ((number * 1000**i, unit) for i, unit in enumerate(("TFLOP", "GFLOP", "MFLOP")))
    value, unit = next((each for each in in_unit if each[0] >= 0.1), (number * 1e6, "MFLOP"))
    return f"{value:,.{1 if value >= 1 else 2}f} {unit}"


def time_in_words(plan: Plan) -> str:
    """The time of the training on this machine, and the measured rate it follows from."""
    if plan.time_s is None or plan.product_gflop_per_s is None:
        return f"not known: {why_no_time(plan)}"
    return (
        f"{about(plan.time_s)} of {'evaluation' if plan.evaluates else 'training'} on this machine "
        f"(measured: {rate_in_words(plan.product_gflop_per_s)} in {plan.precision} products)"
    )


def why_no_time(plan: Plan) -> str:
    """Why the time of a plan is not known."""
    if plan.script is not None:
        return "it does not run on this machine"
    return GPU_IS_FULL if plan.to_fit is None else "it does not fit on this machine"


def precision_table(plan: Plan, width: int) -> Table:
    """The precision map; layers and modules with equal slots share a row."""
    rows: list[list[str | Text]] = []
    by_slot: dict[tuple[str, str], dict[str, list[int]]] = {}
    for entry in plan.precision_map:
        slot = f"{entry['site']}.{entry['product']}.{entry['operand']}"
        modules = by_slot.setdefault((slot, _held_as(entry, plan.precision)), {})
        layers = modules.setdefault(str(entry["module"]), [])
        if entry["layer"] is not None:  # what is rounded outside of products has none
            layers.append(int(str(entry["layer"])))
    for (slot, held_as), modules in by_slot.items():
        by_layers: dict[str, list[str]] = {}
        for module, layers in modules.items():
            by_layers.setdefault(layer_ranges(layers) or "all", []).append(module)
        for ranges, names in by_layers.items():
            shown = escape(" ".join(_experts_together(names)))
            rows.append([layer_words(ranges, names[0]), shown, slot, held_as])
    table = fitted_table(_MAP, rows, width, "precision map").table
    captions = list(plan.conditions)
    if len(plan.map_changes_at) > 1:
        captions.insert(0, f"rules change this map at iterations {plan.map_changes_at[1:]}")
    table.caption = escape("\n".join(captions)) or None
    return table


def _experts_together(names: list[str]) -> list[str]:
    """`expert[0-63]-fc1` for the same module of many experts."""
    together: dict[str, list[int]] = {}
    for name in names:
        expert, _, part = name.rpartition("-")
        if is_routed(name):
            together.setdefault(part, []).append(int(expert.removeprefix("expert")))
    others = [name for name in names if not is_routed(name)]
    return [*others, *(f"expert[{layer_ranges(n)}]-{part}" for part, n in together.items())]


#: What a scheme does with main weights and their rounded values, by product.
_STATE_WORDS = {
    SMOOTH: "{strength:g} times the loss of random rounding in the gradient",
    PULL: "weights pulled towards it, strength {strength:g}, after {start:.0%} of the training",
    RESET: "weights that oscillate reset to it, ratio {ratio:g}, {over} of {every} iterations observed, after "
    "{start:.0%} of the training",
}


def _held_as(entry: dict[str, object], precision: str) -> str:
    if entry["format"] == WORKING:
        return ", ".join([describe_format(WORKING, precision), *_softmax_words(entry)])
    if entry["reuse"]:
        return f"{entry['format']}, the forward copy"
    parts = [str(entry["format"])]
    if entry.get("definition"):
        parts += _declared_words(entry)
    elif entry["block"]:
        parts.append(f"blocks of {entry['block']} along {entry['axis']}")
    if entry["scale_rule"] and not entry.get("definition"):
        parts.append(str(entry["scale_rule"]))
    parts += _scaling_words(entry)
    if entry.get("recipe"):
        parts.append(str(entry["recipe"]).partition("(")[0])
    if words := {"stochastic": "stochastically", "zero": "towards zero"}.get(
        str(entry["rounding"])
    ):
        parts.append(f"rounded {words}")
    if source := entry.get("of"):
        is_copy = source == Of.FORWARD
        parts.append("of the forward copy" if is_copy else f"of its copy in {source}")
    if (pre_scale := entry.get("pre_scale")) is not None:
        part = PRE_SCALE if pre_scale is True else float(str(pre_scale))
        parts.append(f"{factor_words(part)} before and {factor_words(part, inverse=True)} after")
    if entry.get("clip_gradient"):
        parts.append("no gradient where it saturates")
    if (power := entry.get("dge")) is not None:
        parts.append(f"gradient by DGE, k = {float(str(power)):g}")
    if entry.get("hadamard"):
        parts.append(f"{entry['hadamard']} Hadamard in blocks of {entry['hadamard_block']}")
    parts += [_part_words(part, precision) for part in _parts(entry)] + _softmax_words(entry)
    if words := _STATE_WORDS.get(str(entry["product"])) if entry["site"] == OPTIMIZER else None:
        parts.append(words.format(**entry))
    if entry.get("feedback"):
        parts.append("what it takes away added to the first moment")
    return ", ".join(parts)


def _softmax_words(entry: dict[str, object]) -> list[str]:
    """What of attention's softmax P is."""
    words = (
        ["exp(S - m), the product divided by its row's sum"] if entry.get("unnormalised") else []
    )
    if (factor := entry.get("max_factor")) is not None:
        words.append(f"m {float(str(factor)):g} times a repeated maximum")
    return words + (["delta from dO and o"] if entry.get("delta") else [])


def _part_words(part: dict[str, object], precision: str) -> str:
    words = part_words(part)
    is_left_out = part["format"] == LEFT_OUT
    return f"without {words}" if is_left_out else f"apart {words} in {_held_as(part, precision)}"


def _parts(entry: dict[str, object]) -> list[dict[str, object]]:
    parts = entry.get("parts", [])
    assert isinstance(parts, list)
    return parts


def _own_formats(plan: Plan) -> list[str]:
    """A line for each declared format: what it is, and which code quantises."""
    listed = [each for entry in plan.precision_map for each in (entry, *_parts(entry))]
    entries = [entry for entry in listed if entry.get("definition")]
    formats = {fmt.name: fmt for fmt in map(format_of_record, entries)}
    return [
        f"{name}: {_about(fmt)}, quantised by {code_words(fmt)}" for name, fmt in formats.items()
    ]


def _about(fmt: Format) -> str:
    if fmt.family is Family.PYTHON:
        return str(source_file(python_name(fmt)))
    return f"{element_words(fmt)}, {fmt.bits_each():.4g} bits an element"


def _declared_words(entry: dict[str, object]) -> list[str]:
    """Element, block and scale of a declared format."""
    fmt = format_of_record(entry)
    if fmt.family is Family.PYTHON:
        return ["a class of yours"]
    block = entry["block"] if isinstance(entry["block"], int) else None
    words = block_words(fmt, block)
    along = f"along {entry['axis']}"
    if words == "row":
        along = f"one scale {along}"
    elif words:
        along = f"blocks of {words} {along}"
    rule = entry["scale_rule"]
    scale = block_scale_words(fmt, str(rule) if rule else None)
    return [element_words(fmt), *([along] if words else []), *([scale] if scale else [])]


def _scaling_words(entry: dict[str, object]) -> list[str]:
    if entry["scaling"] is None:
        return []
    if entry["scaling"] == "none":
        return ["unscaled"]
    how = str(entry["scaling"])
    if entry.get("window"):
        unit = "micro-batches" if entry.get("recipe") else "iterations"
        how += f" over {entry['window']} {unit}"
    words = [f"one scale a tensor ({how})"]
    return [*words, f"amax to {entry['amax_target']:g}"] if entry["amax_target"] else words
