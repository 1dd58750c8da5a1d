"""Memory of the quantised operands of linear layers, which exist while a product runs. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from quantexp.memory.activations import largest_linear
from quantexp.memory.part import Part
from quantexp.model.decoder import (
    EMBEDDING,
    OUTPUT,
    LinearShape,
    is_column_wise,
    is_routed,
    linear_shapes,
)
from quantexp.model.sizes import element_bytes, output_shape
from quantexp.quant.precision import PrecisionMap
from quantexp.quant.sites import PRODUCTS, Operand, Site, operands_of
from quantexp.schema import Experiment, ModelConfig, TrainingConfig

#: Bytes an element while a part is taken: three float64 and two float32 tensors.
_TAKING_BYTES = 32


def scratch_bytes(experiment: Experiment, maps: Sequence[PrecisionMap], part: Part) -> int:
    """Bytes of the buffers that every linear layer writes its quantised operands to: the largest w, x and twice g.

    On a CPU the buffers exist (`quantexp.quant.weight_cache.buffers`) if weight copies do; on a GPU the allocator
    reuses the memory.
    """
    model, training = experiment.model, experiment.training
    if not training.weight_cache:
        return 0
    widths = linear_widths(model, part)
    elements = _operand_elements(
        part.tokens(training),
        largest_linear(model, part),
        max(width for width, _ in widths),
        max(width for _, width in widths),
    )
    quantised = _quantised_operands(maps, lambda name: name not in (OUTPUT, EMBEDDING))
    most = dict.fromkeys(elements, 0) | {name: elements[name] for name in quantised}
    beside = output_copies(model, training, maps, part)
    return sum(max(n, beside.get(name, 0)) for name, n in most.items()) * element_bytes(training)


def output_copies(
    model: ModelConfig, training: TrainingConfig, maps: Sequence[PrecisionMap], part: Part
) -> dict[Operand, int]:
    """Elements of the quantised operands of the output layer, or of a tied embedding, that a rank of the part has."""
    names = (OUTPUT,) * part.is_last + (EMBEDDING,) * part.is_first
    width, rows = model.hidden_size, output_shape(model).output_width // part.layout.tensor
    elements = _operand_elements(part.tokens(training), rows * width, width, rows)
    quantised = _quantised_operands(maps, lambda name: name in names)
    return {name: elements[name] for name in quantised}


def summed_bytes(experiment: Experiment, maps: Sequence[PrecisionMap], part: Part) -> int:
    """Bytes of the largest product of sums of parts: its operands, and float32 and float64 tensors of one of them.

    Each part of an operand lies beside each of the other's. Maps of an evaluation have the forward product alone.
    """
    model, training = experiment.model, experiment.training
    tokens, widths = part.tokens(training), linear_widths(model, part)
    within = _operand_elements(
        tokens,
        largest_linear(model, part),
        max(width for width, _ in widths),
        max(width for _, width in widths),
    )
    rows = output_shape(model).output_width // part.layout.tensor
    output = _operand_elements(tokens, rows * model.hidden_size, model.hidden_size, rows)
    modules = {
        (id(module.alike), name.name == OUTPUT): module
        for declared in maps
        for name, module in declared.items()
        if module.is_linear
    }
    most = 0
    for (_, is_output), module in modules.items():
        elements = output if is_output else within
        for product in PRODUCTS[Site.LINEAR]:
            pair = operands_of(Site.LINEAR, product)
            specs = {s.operand: module.alike[s] for s in pair if s in module.alike}
            pairs = prod(spec.num_pieces for spec in specs.values())
            if pairs > 1:
                split = max(elements[name] for name, spec in specs.items() if spec.parts)
                multiplied = pairs * sum(elements[name] for name in specs)
                most = max(most, multiplied * element_bytes(training) + _TAKING_BYTES * split)
    return most


def _operand_elements(
    tokens: int, weight: int, input_width: int, output_width: int
) -> dict[Operand, int]:
    """Elements of the copies of each operand of a linear layer that exist at once."""
    return {
        Operand.W: weight,
        Operand.X: tokens * input_width,
        Operand.G: 2 * tokens * output_width,
    }


def _quantised_operands(
    maps: Sequence[PrecisionMap], is_one: Callable[[str], bool]
) -> set[Operand]:
    """The operands that are quantised in some linear module with such a name, or in a lookup."""
    modules = {
        (id(module.alike), is_one(name.name)): module
        for declared in maps
        for name, module in declared.items()
    }
    return {
        slot.operand
        for (_, is_wanted), module in modules.items()
        for slot, spec in module.alike.items()
        if is_wanted and spec.quantised and slot.site in (Site.LINEAR, Site.OUTPUT)
    }


def linear_widths(model: ModelConfig, part: Part) -> list[tuple[int, int]]:
    """The widths of a rank's linear modules, without routed experts."""
    return [
        _widths(name, shape, part)
        for layer, _ in part.alike_layers(model)
        for name, shape in linear_shapes(model, layer).items()
        if not is_routed(name)
    ]


def _widths(name: str, shape: LinearShape, part: Part) -> tuple[int, int]:
    """The input and output width of a rank's share of a linear module."""
    ranks = part.ranks_of(name)
    if is_column_wise(name):
        return shape.input_width // ranks, shape.output_width
    return shape.input_width, shape.output_width // ranks
