"""Slots whose blocks fall otherwise in a layout than in one process; every other slot has the same numbers.

A block, or the block of a Hadamard transform, runs along the axis that the product reduces over. Where ranks share that
axis, a rank's shard starts within a block unless its extent is a multiple of the block:

    axis           shared by                  extent of a rank's shard
    input width    proj, fc2: tensor          input / tensor
    output width   qkv, q-*, kv-*: tensor     output / tensor
                   output: tensor             padded vocabulary / tensor
                   fc1: tensor                output / 2 / tensor, for gate and up each
    tokens         linear layers: context     tokens / (2 x context): a rank has two ranges of a sequence
    queries        attention: context         the same
    keys, head_dim nobody: keys are gathered, heads are divided whole

A mean is taken over one axis, channels and elements are chosen in the whole operand: a part of a slot (`PARTS`) is that
of one process where ranks have all of these axes.

Moments and gradients that a scheme rounds have their blocks along a weight's input width.

Routed experts are shared by `expert_tensor`. Expert parallelism itself changes no block: an expert takes the sequences
of each source separately. Under context parallelism it receives the tokens of a part of a sequence, as many as the
router sends, so its blocks along tokens never match, nor do the positions that its random numbers follow from, nor does
one scale for all of its tokens: a rank without a token for an expert does not take part. The same holds where the ranks
of an expert are fewer than those of `tensor`, which divide the tokens of a sequence between them. Elsewhere ranks know
the positions of their parts, and the amax of a tensor with one scale is reduced over them. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import WHOLE_ROW, Axis, Family
from quantexp.model.decoder import (
    EMBEDDING,
    OUTPUT,
    LinearShape,
    in_words,
    is_column_wise,
    is_routed,
    layer_modules,
)
from quantexp.model.layout import Layout
from quantexp.model.sizes import output_shape
from quantexp.quant.outside_products import StateSlot, state_slots
from quantexp.quant.part_options import part_axes
from quantexp.quant.precision import PrecisionMap, Slots, configured, declared_maps, forward_only
from quantexp.quant.sites import Operand, Slot
from quantexp.schema import Experiment, ModelConfig, Unaligned

#: In place of a block: what a part is taken over is divided between ranks.
PARTS = -1


@dataclass(frozen=True)
class Misalignment:
    """Slots whose blocks fall otherwise, with their modules."""

    slots: tuple[Slot | StateSlot, ...]
    modules: tuple[str, ...]
    #: Elements of a block; None for one scale a tensor, 0 for random numbers by position, `PARTS` for those of a sum.
    block: int | None
    #: Elements of a rank's shard along the axis; None if it varies.
    extent: int | None

    def __str__(self) -> str:
        if self.block == PARTS:
            return f"{', '.join(map(str, self.slots))} of {in_words(self.modules)} (parts of whole operands)"
        shard = "any number" if self.extent is None else f"{self.extent:,}"
        slots = ", ".join(map(str, self.slots))
        if self.block == 0:
            return f"{slots} of {in_words(self.modules)} (stochastic rounding by position)"
        scale = "one scale a tensor" if self.block is None else f"blocks of {self.block}"
        scale = "whole rows" if self.block is not None and self.block >= WHOLE_ROW else scale
        return f"{slots} of {in_words(self.modules)} ({scale}, {shard} to a rank)"


#: The axis of a weight's rows, by that of its blocks.
_OTHER_AXIS: dict[Axis | None, Axis] = {
    Axis.INPUT_WIDTH: Axis.OUTPUT_WIDTH,
    Axis.OUTPUT_WIDTH: Axis.INPUT_WIDTH,
}

#: A module's name, the shape of its weight, and slots that it has in some layer at some iteration.
Kind = tuple[str, LinearShape | None, Slots | dict[StateSlot, QuantSpec]]


def kinds_of_modules(model: ModelConfig, maps: Sequence[PrecisionMap]) -> list[Kind]:
    """Every module name with each distinct set of slots that it has in the maps."""
    beside = dict.fromkeys((OUTPUT, EMBEDDING), output_shape(model))
    shapes = [{**layer_modules(model, layer), **beside} for layer in _first_layers(model)]
    kinds: dict[tuple[str, int, bool], Kind] = {}
    for declared in maps:
        for module, precision in declared.items():
            has_experts = model.moe is not None and module.layer >= model.moe.num_dense_layers
            shape, slots = shapes[has_experts].get(module.name), precision.alike
            kinds.setdefault((module.name, id(slots), has_experts), (module.name, shape, slots))
    return list(kinds.values())


def misalignments(kinds: Sequence[Kind], layout: Layout, num_tokens: int) -> list[Misalignment]:
    """The slots whose blocks differ from those of one process; empty if none does.

    Args:
        kinds: the modules and their slots.
        layout: any layout.
        num_tokens: the length of a sequence.
    """
    modules: dict[tuple[int | None, int | None, Slot | StateSlot], dict[str, None]] = {}
    for name, shape, slots in kinds:
        for slot, spec in slots.items():
            reasons: list[tuple[int | None, int | None]] = [
                (block, extent)
                for block, axis in _blocks(spec)
                for extent in (_extent(name, shape, axis, num_tokens, layout),)
                if extent is None or extent % block
            ]
            if any(
                _extent(name, shape, axis, num_tokens, layout) != 0
                for part in spec.parts
                for axis in part_axes(part, slot.operand)
            ):
                reasons.append((PARTS, None))
            follows_tokens = isinstance(slot, Slot) and slot.operand is not Operand.W
            if follows_tokens and _is_parted(name, layout):
                reasons += [(0, None)] if spec.draws else []
                reasons += [(None, None)] if spec.is_scaled else []
            for reason in reasons:
                shown = configured(name, slot) if isinstance(slot, Slot) else slot
                modules.setdefault((*reason, shown), {})[name] = None
    alike: dict[tuple[tuple[str, ...], int | None, int | None], list[Slot | StateSlot]] = {}
    for (block, extent, slot), names in modules.items():
        alike.setdefault((tuple(names), block, extent), []).append(slot)
    return [
        Misalignment(tuple(slots), names, block, extent)
        for (names, block, extent), slots in alike.items()
    ]


def unaligned_slots(experiment: Experiment) -> list[Misalignment]:
    """The slots of an experiment whose blocks fall otherwise in its layout than in one process."""
    layout = Layout.of(experiment)
    if layout.is_whole:
        return []
    maps = declared_maps(experiment.model, experiment.quant)
    if experiment.evaluate.only:
        maps = list(map(forward_only, maps))
    kinds = kinds_of_modules(experiment.model, maps)
    outside = {slot: slot.spec for slot in state_slots(experiment.quant)}
    if outside and not experiment.evaluate.only:
        shapes = {name: shape for name, shape, _ in kinds if shape is not None}
        kinds += [(name, shape, outside) for name, shape in shapes.items()]
    return misalignments(kinds, layout, experiment.training.seq_length)


def check_alignment(experiment: Experiment) -> None:
    """Refuse a layout in which blocks of some slots fall otherwise than in one process, unless it is accepted.

    Raises:
        ConfigError: names the sizes, the slots and their modules.
    """
    if experiment.parallel.unaligned is Unaligned.accept:
        return
    if unaligned := unaligned_slots(experiment):
        raise ConfigError(
            f"{' and '.join(_sizes(experiment, unaligned))} must leave the blocks of every slot as in one process, got "
            f"others in {'; '.join(map(str, unaligned))}; take a smaller size, or parallel.unaligned=accept for a run "
            "with its own numbers"
        )


def check_parts(experiment: Experiment) -> None:
    """Refuse parts of routed experts' operands, whose rows the router chooses.

    Raises:
        ConfigError: names the slot.
    """
    if experiment.model.moe is None:
        return
    for declared in declared_maps(experiment.model, experiment.quant):
        for name, module in declared.items():
            for entry in module.entries() if is_routed(name.name) else ():
                if entry.spec.parts:
                    raise ConfigError(
                        f"{entry.label} must have no parts: an expert has the tokens that the router sends, of several "
                        "micro-batches at once; add a rule {modules: [expert*], parts: []}"
                    )


def _sizes(experiment: Experiment, unaligned: Sequence[Misalignment]) -> list[str]:
    """The keys that divide the blocks, with their values."""
    layout = Layout.of(experiment)
    keys: dict[str, None] = {}
    for one in unaligned:
        if one.block == PARTS:
            for key, size in (("context", layout.context), ("tensor", layout.tensor)):
                keys |= {f"parallel.{key}={size}": None} if size > 1 else {}
            continue
        along_sequence = one.slots[0].axis in (Axis.TOKENS, Axis.QUERIES)
        if layout.context > 1 and (not one.block or along_sequence):
            keys[f"parallel.context={layout.context}"] = None
        elif not one.block or along_sequence:
            keys[f"parallel.tensor={layout.tensor}"] = None
        elif layout.expert > 1 and all(map(is_routed, one.modules)):
            keys[f"parallel.expert_tensor={layout.expert_tensor}"] = None
        else:
            keys[f"parallel.tensor={layout.tensor}"] = None
    return list(keys)


def _first_layers(model: ModelConfig) -> tuple[int, int]:
    """A dense layer and one with experts, if the model has both; otherwise the same layer twice."""
    moe = model.moe
    return 0, 0 if moe is None else min(moe.num_dense_layers, model.num_layers - 1)


def _blocks(spec: QuantSpec) -> Iterator[tuple[int, Axis | None]]:
    """The extents that a shard must be a multiple of, each with its axis."""
    if spec.fmt.block is not None:
        yield spec.block, spec.axis
    if spec.fmt.across > 1:
        yield spec.fmt.across, _OTHER_AXIS.get(spec.axis)
    if spec.fmt.family is Family.PYTHON:
        yield WHOLE_ROW, spec.axis
        yield WHOLE_ROW, _OTHER_AXIS.get(spec.axis)
    if spec.is_transformed and spec.hadamard_block != spec.block:
        yield spec.hadamard_block, spec.axis
    if spec.of is not None and spec.is_of_stored:
        yield from _blocks(spec.of)
    for part in spec.parts:
        yield from () if part.spec is None else _blocks(part.spec)


def _is_parted(name: str, layout: Layout) -> bool:
    """Whether ranks have parts of the tokens of a sequence for an expert, and do not know of one another's."""
    group = layout.expert * layout.expert_tensor
    return is_routed(name) and (layout.context > 1 or group % layout.tensor > 0)


def _extent(
    name: str, shape: LinearShape | None, axis: Axis | None, tokens: int, layout: Layout
) -> int | None:
    """Elements of a rank's shard along the axis of the blocks; 0 where it has the whole axis, None where it varies."""
    ranks = layout.expert_tensor if is_routed(name) else layout.tensor
    match axis:
        case Axis.INPUT_WIDTH if shape is not None and is_column_wise(name) and ranks > 1:
            return shape.input_width // ranks
        case Axis.OUTPUT_WIDTH if shape is not None and not is_column_wise(name) and ranks > 1:
            halves = 2 if name.endswith("fc1") else 1
            return shape.output_width // halves // ranks
        case Axis.TOKENS if _is_parted(name, layout):
            return None
        case Axis.TOKENS | Axis.QUERIES if layout.context > 1:
            return tokens // (2 * layout.context)
    return 0
