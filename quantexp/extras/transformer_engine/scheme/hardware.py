"""Which recipes a GPU can run, by compute capability, CUDA and Transformer Engine's version.

The table repeats the checks of Transformer Engine (pytorch/quantization.py of 2.11.0: `check_fp8_support` and its
siblings) and Megatron-Core's least versions, so that a plan answers for a machine that is not there. A run asks
Transformer Engine itself when it builds its model. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.schema.quant import TE_INSTALL

Numbers = tuple[int, ...]

#: The package's name in a registry.
PACKAGE = "transformer-engine"
#: The least version that quantexp runs with.
LEAST_VERSION: Numbers = (2, 9)

#: Compute capability by the name of a GPU in lower case; a longer name contains the first one that fits.
CAPABILITIES: dict[str, Numbers] = {
    "v100": (7, 0),
    "a100": (8, 0),
    "l40s": (8, 9),
    "l40": (8, 9),
    "l4": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "h20": (9, 0),
    "gh200": (9, 0),
    "gb200": (10, 0),
    "b100": (10, 0),
    "b200": (10, 0),
    "gb300": (10, 3),
    "b300": (10, 3),
    "rtx5090": (12, 0),
}


@dataclass(frozen=True)
class Needs:
    """What a recipe needs."""

    #: The least compute capability, and the first one from which it is not supported.
    capability: Numbers
    below: Numbers | None = None
    #: The least CUDA.
    cuda: Numbers = (12, 1)


NEEDS: dict[Kind, Needs] = {
    Kind.MXFP8: Needs((10, 0), below=(12, 0), cuda=(12, 8)),
    Kind.CURRENT: Needs((8, 9)),
    Kind.DELAYED: Needs((8, 9)),
    Kind.BLOCK: Needs((9, 0), cuda=(12, 9)),
    Kind.NVFP4: Needs((10, 0), cuda=(12, 8)),
    Kind.CUSTOM: Needs((8, 9)),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU, here or not; None for what is not known."""

    name: str
    capability: Numbers
    cuda: Numbers | None = None


def gpu_named(name: str) -> Gpu | None:
    """The GPU whose name is a known one, or contains it (`nvidia_h100_80gb_hbm3`); None if none is."""
    plain = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    fitting = [known for known in CAPABILITIES if known in plain]
    return Gpu(name, CAPABILITIES[max(fitting, key=len)]) if fitting else None


def obstacle(recipe: Recipe, gpu: Gpu) -> str | None:
    """Why a GPU cannot run a recipe; None if nothing is known to prevent it."""
    needs, capability = NEEDS[recipe.kind], gpu.capability
    has = f"{gpu.name} has {_dotted(capability)}"
    if capability < needs.capability:
        return f"{recipe} needs compute capability {_dotted(needs.capability)} or higher, and {has}"
    if needs.below is not None and capability >= needs.below:
        return f"{recipe} needs a compute capability below {_dotted(needs.below)}, and {has}"
    if recipe.kind is Kind.BLOCK and capability >= (10, 0) and not recipe.power_of_two:
        return f"{recipe} needs scales that are powers of two from compute capability 10.0 on, and {has}"
    if gpu.cuda is not None and gpu.cuda < needs.cuda:
        return f"{recipe} needs CUDA {_dotted(needs.cuda)} or newer, and torch is built for {_dotted(gpu.cuda)}"
    return None


def too_old(version: str) -> str | None:
    """Why a version of Transformer Engine is refused; None if it is not."""
    numbers = version_numbers(version)
    if numbers >= LEAST_VERSION:
        return None
    return (
        f"needs Transformer Engine {_dotted(LEAST_VERSION)} or newer, got {version}; {TE_INSTALL}"
    )


def version_numbers(version: str) -> Numbers:
    """`2.11.0+c188b53` as (2, 11, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))
