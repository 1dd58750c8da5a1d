"""`quantexp verify --backend transformer_engine`: quantises tensors by each recipe and compares bytes and scales.

The quantizers are those that a linear layer gets from a recipe, for x, w and g; each makes its rowwise and columnwise
copy, and `proof.conformity` compares both with the formats of the schemes. Under block scales alone
the tensors have every 16-bit value, amaxes around every threshold of the scales and ties, for MXFP8 also NaN and Inf. A
recipe that Transformer Engine refuses on this machine is absent, with its reason.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantexp.errors import VerifyError
from quantexp.extra import Service, required
from quantexp.extras.transformer_engine.proof.conformity import Comparison, compare, other_format
from quantexp.extras.transformer_engine.proof.stored import read
from quantexp.extras.transformer_engine.rank.recipes import autocast, te_recipe
from quantexp.extras.transformer_engine.rank.support import te_version, why_unsupported
from quantexp.extras.transformer_engine.scheme.hardware import version_numbers
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.formats import QuantSpec, get_format, resolve
from quantexp.formats.definitions.files import shipped_formats
from quantexp.quant.sites import Operand

#: Names of an operand's copies, by the dimension that its blocks run along.
COPIES = {-1: "rowwise", 0: "columnwise"}
#: Rows and columns are multiples of this, for every recipe's blocks.
_WIDTH = 128
_SEED = 7


@dataclass(frozen=True)
class Subject:
    """A recipe, the format of each operand that it quantises, and the tensors that it is tried on."""

    recipe: Recipe
    formats: Mapping[Operand, QuantSpec]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass
class Row:
    """The comparisons of one copy of an operand, over all tensors."""

    recipe: str
    operand: str
    format: str
    copy: str
    elements: int = 0
    mismatches: int = 0
    #: Elements (of zero blocks: scales) that differ as expected, by reason (`conformity`).
    expected: Counter[str] = field(default_factory=Counter)
    #: The first tensor that does not conform, and how.
    example: str = ""

    def add(self, tensor: str, comparison: Comparison) -> None:
        """Count a comparison."""
        self.elements += comparison.elements
        self.mismatches += comparison.code_mismatches + comparison.scale_mismatches
        self.expected += comparison.expected
        if not comparison.conforms and not self.example:
            self.example = f"{tensor}: {comparison}"


@dataclass(frozen=True)
class Outcome:
    """The rows, and the recipes that this machine cannot run, with the reason."""

    version: str
    rows: list[Row]
    absent: dict[str, str]

    @property
    def mismatches(self) -> int:
        """Codes and scales that differ without a reason."""
        return sum(row.mismatches for row in self.rows)


def subjects() -> list[Subject]:
    """Every recipe whose bytes are determined: none rounds stochastically, transforms or remembers."""
    declared = shipped_formats()

    def of(x: str, g: str | None = None, w: str | None = None, **options: Any) -> Any:
        names = {Operand.X: x, Operand.W: w or x, Operand.G: g or x}
        return {
            operand: resolve(get_format(name, declared), **options)
            for operand, name in names.items()
        }

    return [
        Subject(
            Recipe(Kind.MXFP8, hybrid=True),
            of("mxfp8_e4m3", "mxfp8_e5m2", scale_rule="rceil"),
            tensors_with_nonfinite,
        ),
        Subject(
            Recipe(Kind.CURRENT, hybrid=True),
            of("fp8_e4m3", "fp8_e5m2", scaling="exact"),
            normal_tensors,
        ),
        Subject(
            Recipe(Kind.CURRENT, hybrid=True, power_of_two=True),
            of("fp8_e4m3", "fp8_e5m2", scaling="current"),
            normal_tensors,
        ),
        Subject(
            Recipe(Kind.BLOCK, power_of_two=True, weight_rows=128),
            of("fp8_1x128_pow2", w="fp8_128x128_pow2"),
            finite_tensors,
        ),
        Subject(Recipe(Kind.NVFP4, weight_rows=16), of("nvfp4", w="nvfp4_16x16"), normal_tensors),
    ]


def run_conformance() -> Outcome:
    """Compare every recipe of this machine.

    Raises:
        VerifyError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VerifyError(
            "verify --backend transformer_engine quantises on a GPU, and this machine has none"
        )
    return conform(torch.device("cuda"))


def conform(device: torch.device) -> Outcome:
    """Compare every recipe that Transformer Engine runs here, on tensors of a device."""
    rows: list[Row] = []
    absent = {}
    for subject in subjects():
        if (reason := why_unsupported(subject.recipe.kind)) is None:
            rows += _rows(subject, device, version_numbers(te_version()))
        else:
            absent[str(subject.recipe)] = reason
    return Outcome(te_version(), rows, absent)


def _rows(subject: Subject, device: torch.device, version: tuple[int, ...]) -> Iterator[Row]:
    for operand, quantizer in _quantizers(subject, device).items():
        spec = subject.formats[operand]
        quantizer.set_usage(rowwise=True, columnwise=True)
        rows = {
            axis: Row(str(subject.recipe), operand.value, spec.fmt.name, copy)
            for axis, copy in COPIES.items()
        }
        for name, x in subject.tensors():
            x = x.to(device)
            held = quantizer(x)
            for axis, row in rows.items():
                stored = read(held, axis)
                assert stored is not None
                if other := other_format(stored, spec):
                    row.mismatches += x.numel()
                    row.example = row.example or f"{name}: {other} instead of {spec.fmt.name}"
                else:
                    row.add(name, compare(stored, spec, x, version))
        yield from rows.values()


def _quantizers(subject: Subject, device: torch.device) -> dict[Operand, Any]:
    """The quantizers of a linear layer's operands."""
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    layer = pytorch.Linear(_WIDTH, _WIDTH, bias=False, params_dtype=torch.bfloat16, device=device)
    with autocast(te_recipe(subject.recipe)):
        layer.init_fp8_metadata()
    x, w, *_ = layer.quantizers["scaling_fwd"]
    return {Operand.X: x, Operand.W: w, Operand.G: layer.quantizers["scaling_bwd"][0]}


def normal_tensors() -> Iterator[tuple[str, Tensor]]:
    """Matrices of normal values, whose extents are multiples of 128, with names."""
    generator = torch.Generator().manual_seed(_SEED)
    normal = torch.randn(512, 512, generator=generator)
    yield "normal values in bfloat16", normal.to(torch.bfloat16)
    yield "normal values in float32", normal
    spread = normal * torch.exp(2 * torch.randn(512, 1, generator=generator))
    yield "rows of many magnitudes", spread.to(torch.bfloat16)


def finite_tensors() -> Iterator[tuple[str, Tensor]]:
    """As `tensors_with_nonfinite`, with zeros for NaN and Inf."""
    for name, x in tensors_with_nonfinite():
        yield name, x.nan_to_num(0.0, 0.0, 0.0)


def tensors_with_nonfinite() -> Iterator[tuple[str, Tensor]]:
    """Also every 16-bit value, and blocks of 32 around every threshold of the scales."""
    yield from normal_tensors()
    hard_tensors = required(Service.HARD_TENSORS, "verify --backend transformer_engine")
    for name, values, dtype in hard_tensors(_WIDTH):
        yield name, torch.from_numpy(values).to(getattr(torch, dtype))
