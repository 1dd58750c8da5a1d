"""The extents that Transformer Engine's kernels can quantise and multiply.

    recipe                widths and rows are multiples of
    MXFP8BlockScaling     32: there is no short block (pytorch/tensor/mxfp8_tensor.py)
    NVFP4BlockScaling     16: the same (pytorch/tensor/nvfp4_tensor.py)
    Float8BlockScaling    16: a block of 128 may be short, cuBLAS asks for 16 bytes
    others in 8 bits      16: cuBLAS asks for it along every operand's rows and columns

Sequence parallelism gathers the quantised x of column-parallel layers. Float8BlockScaling can gather whole blocks
alone, so that a rank's x must then have multiples of 128 (`Float8BlockQuantizer.is_quantizable`; up to 2.13 asserted).

The rows of x and g are the tokens of a whole micro-batch: t * B + b for token t of sequence b of B. A block along
tokens therefore holds tokens of B sequences, where quantexp's lie within one. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.model.decoder import LinearShape, is_column_wise
from quantexp.model.layout import Layout
from quantexp.schema import TrainingConfig

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
