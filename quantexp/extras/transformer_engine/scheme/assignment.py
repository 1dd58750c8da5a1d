"""The recipe of every linear module of a run, what it differs in from the emulation, and modules that have none.

Routed experts, the output layer and attention stay emulated: an expert has any number of tokens, which 8-bit kernels do
not take; Megatron builds the output layer itself; and no recipe holds the slots of attention. Needs no torch.

Transformer Engine's kernels can quantise and multiply only some extents:

    recipe                widths and rows are multiples of
    MXFP8BlockScaling     32: there is no short block (pytorch/tensor/mxfp8_tensor.py)
    NVFP4BlockScaling     16: the same (pytorch/tensor/nvfp4_tensor.py)
    Float8BlockScaling    16: a block of 128 may be short, cuBLAS asks for 16 bytes
    others in 8 bits      16: cuBLAS asks for it along every operand's rows and columns

Sequence parallelism gathers the quantised x of column-parallel layers. Float8BlockScaling can gather whole blocks
alone, so that a rank's x must then have multiples of 128 (`Float8BlockQuantizer.is_quantizable`; up to 2.13 asserted).

The rows of x and g are the tokens of a whole micro-batch: t * B + b for token t of sequence b of B. A block along
tokens therefore holds tokens of B sequences, where quantexp's lie within one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.extras.transformer_engine.scheme.representation import (
    Nearness,
    Representation,
    Unrepresentable,
    represent,
    weakest,
)
from quantexp.model.decoder import EMBEDDING, OUTPUT, LinearShape, is_column_wise, is_routed
from quantexp.model.layout import Layout
from quantexp.quant.precision import (
    Entry,
    ModuleId,
    ModulePrecision,
    PrecisionMap,
    Slots,
)
from quantexp.schema import Backend, Experiment, QuantConfig, TrainingConfig

#: The recipe of modules under `te_emulated`.
OWN_FORMATS = Recipe(Kind.CUSTOM)


@dataclass(frozen=True)
class Assignment:
    """Modules with one recipe, and how near its operands are to those of the emulation."""

    recipe: Recipe | None
    nearness: Nearness
    notes: tuple[str, ...]
    modules: tuple[ModuleId, ...]


def is_native(module: ModulePrecision) -> bool:
    """Whether Transformer Engine multiplies a module's operands under a backend that takes its linear layers."""
    name = module.module.name
    return module.is_linear and name not in (OUTPUT, EMBEDDING) and not is_routed(name)


def assignments(experiment: Experiment, declared: PrecisionMap) -> list[Assignment]:
    """The recipes of a map, each once, in the order of the modules.

    Raises:
        ConfigError: names the slot of a module that no recipe holds together with the others.
    """
    found: dict[tuple[Recipe | None, Nearness, tuple[str, ...]], list[ModuleId]] = {}
    known: dict[int, Representation] = {}
    for module in filter(is_native, declared.values()):
        if id(module.alike) not in known:
            known[id(module.alike)] = _required(module, experiment.quant)
        nearness, notes = _here(experiment, known[id(module.alike)])
        key = known[id(module.alike)].recipe, nearness, notes
        found.setdefault(key, []).append(module.module)
    return [Assignment(*key, tuple(modules)) for key, modules in found.items()]


def _required(module: ModulePrecision, quant: QuantConfig) -> Representation:
    result = _represented(module.alike, quant)
    if isinstance(result, Representation):
        return result
    label = Entry(module.module, result.slot, module.spec(result.slot)).label
    remedy = "" if result.is_delayed else "; take quant.backend=te_emulated, or emulated"
    raise ConfigError(f"quant.backend={quant.backend.value}: {label} {result}{remedy}")


def _represented(slots: Slots, quant: QuantConfig) -> Representation | Unrepresentable:
    if quant.backend is not Backend.te_emulated:
        return represent(slots, quant.recipe)
    is_quantised = any(spec.quantised for spec in slots.values())
    return Representation(OWN_FORMATS if is_quantised else None)


def _here(experiment: Experiment, found: Representation) -> tuple[Nearness, tuple[str, ...]]:
    """How near a recipe is in this experiment, and why it is not bit-equal."""
    recipe = found.recipe
    if recipe is None:
        return found.nearness, ()
    differences = list(_differences(experiment, recipe))
    nearness = weakest([found.nearness, *([Nearness.STATISTICAL] if differences else [])])
    notes = ([found.why] if found.why else []) + differences
    if recipe.kind is Kind.CURRENT:
        notes.append("the forward product accumulates fast, in fewer bits")
    return nearness, tuple(notes)


def _differences(experiment: Experiment, recipe: Recipe) -> Iterator[str]:
    """Blocks and scales that lie otherwise in this experiment than in the emulation."""
    training, layout = experiment.training, Layout.of(experiment)
    if crosses_sequences(recipe, training):
        yield (
            f"wgrad's blocks along tokens hold tokens of all {training.micro_batch_size} sequences of a micro-batch, "
            "where the emulation's lie within one (training.micro_batch_size=1)"
        )
    has_own_scale = recipe.kind in (Kind.CURRENT, Kind.NVFP4)
    if layout.tensor > 1 and has_own_scale:
        yield (
            "each tensor-parallel rank scales its own shard of w, of x in proj and fc2, and of g in the other modules"
        )
    if layout.context > 1 and has_own_scale:
        yield "each context-parallel rank scales its own tokens of x and g"
    if recipe.kind is Kind.DELAYED and layout.tensor * layout.context * layout.data > 1:
        yield (
            "a micro-batch enters the history with the largest amax of all tensor-, context- and data-parallel ranks"
        )


#: Multiples by kind; Transformer Engine checks its linear layers' extents under a custom recipe, too.
MULTIPLES = {
    Kind.MXFP8: 32,
    Kind.NVFP4: 16,
    Kind.BLOCK: 16,
    Kind.CURRENT: 16,
    Kind.DELAYED: 16,
    Kind.CUSTOM: 16,
}
#: Of x under Float8BlockScaling, where it is gathered.
GATHERED_MULTIPLE = 128
_COLUMNS_OF_X, _TOKENS = "columns of x", "tokens"


def misfit(
    recipe: Recipe, module: str, shape: LinearShape, training: TrainingConfig, layout: Layout
) -> str | None:
    """What a recipe cannot do with a module of this shape; None if it can."""
    multiple = MULTIPLES[recipe.kind]
    extents = dict(_extents(module, shape, training, layout))
    for name, extent in extents.items():
        if extent % multiple:
            return f"has {extent:,} {name}, and {recipe} takes multiples of {multiple}"
    if recipe.kind is not Kind.BLOCK or not layout.sequence or is_column_wise(module):
        return None
    for name in (_COLUMNS_OF_X, _TOKENS):
        if extents[name] % GATHERED_MULTIPLE:
            return (
                f"has {extents[name]:,} {name} on a rank, and {recipe} gathers multiples of {GATHERED_MULTIPLE} under "
                "sequence parallelism, which parallel.sequence=false turns off"
            )
    return None


def _extents(
    module: str, shape: LinearShape, training: TrainingConfig, layout: Layout
) -> Iterator[tuple[str, int]]:
    """Input width, output width and rows of a rank."""
    by_input = is_column_wise(module)
    inputs, outputs = (layout.tensor, 1) if by_input else (1, layout.tensor)
    yield _COLUMNS_OF_X, shape.input_width // inputs
    yield "columns of g", shape.output_width // outputs
    tokens = training.seq_length * training.micro_batch_size // layout.context
    yield _TOKENS, tokens // (layout.tensor if layout.sequence else 1)


def crosses_sequences(recipe: Recipe, training: TrainingConfig) -> bool:
    """Whether a block along tokens holds tokens of several sequences."""
    return recipe.has_token_blocks and training.micro_batch_size > 1
