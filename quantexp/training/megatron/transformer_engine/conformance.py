"""`quantexp verify --backend transformer_engine`: quantises tensors by each recipe and compares bytes and scales.

The quantizers are those that a linear layer gets from a recipe, for x, w and g; each makes its rowwise and columnwise
copy, and `quantexp.proof.transformer_engine` compares both with the formats of the schemes. Under block scales alone
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
from quantexp.formats import QuantSpec, get_format, resolve
from quantexp.formats.lookup import shipped_formats
from quantexp.formats.verify import cases
from quantexp.proof.transformer_engine.conformity import Comparison, compare, other_format
from quantexp.proof.transformer_engine.stored import read
from quantexp.training.megatron.without_te import hide_broken_te

#: Names of an operand's copies, by the dimension that its blocks run along.
COPIES = {-1: "rowwise", 0: "columnwise"}
#: Rows and columns are multiples of this, for every recipe's blocks.
_WIDTH = 128
_SEED = 7


@dataclass(frozen=True)
class Subject:
    """A recipe, and the format of each operand that it quantises."""

    name: str
    #: Makes the recipe from `transformer_engine.common.recipe`.
    make: Callable[[Any], Any]
    #: The function of `transformer_engine.pytorch` that says whether this machine can.
    support: str
    formats: Mapping[str, QuantSpec]
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
    #: Elements that differ as expected, by reason (`conformity`).
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
    """Every recipe whose bytes are determined: none rounds stochastically or transforms."""
    declared = shipped_formats()

    def of(name: str, **options: Any) -> QuantSpec:
        return resolve(get_format(name, declared), **options)

    def fp8(scaling: str) -> dict[str, QuantSpec]:
        forward, backward = (of(f"fp8_{each}", scaling=scaling) for each in ("e4m3", "e5m2"))
        return {"x": forward, "w": forward, "g": backward}

    def mx(element: str) -> QuantSpec:
        return of(f"mxfp8_{element}", scale_rule="rceil")

    blocks = of("fp8_1x128_pow2")
    return [
        Subject(
            "MXFP8BlockScaling",
            lambda recipes: recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID),
            "is_mxfp8_available",
            {"x": mx("e4m3"), "w": mx("e4m3"), "g": mx("e5m2")},
            tensors_with_nonfinite,
        ),
        Subject(
            "Float8CurrentScaling",
            lambda recipes: _current(recipes, False),
            "is_fp8_available",
            fp8("exact"),
            normal_tensors,
        ),
        Subject(
            "Float8CurrentScaling, powers of two",
            lambda recipes: _current(recipes, True),
            "is_fp8_available",
            fp8("current"),
            normal_tensors,
        ),
        Subject(
            "Float8BlockScaling",
            lambda recipes: recipes.Float8BlockScaling(use_f32_scales=False),
            "is_fp8_block_scaling_available",
            {"x": blocks, "w": of("fp8_128x128_pow2"), "g": blocks},
            finite_tensors,
        ),
        Subject(
            "NVFP4BlockScaling",
            lambda recipes: recipes.NVFP4BlockScaling(
                disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=False
            ),
            "is_nvfp4_available",
            {"x": of("nvfp4"), "w": of("nvfp4_16x16"), "g": of("nvfp4")},
            normal_tensors,
        ),
    ]


def run_conformance() -> Outcome:
    """Compare every recipe of this machine.

    Raises:
        VerifyError: there is no Transformer Engine, or no GPU.
    """
    why = "verify --backend transformer_engine quantises on a GPU with Transformer Engine"
    reason = hide_broken_te()
    if reason is None:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except ImportError as error:
            reason = str(error)
    if reason is not None:
        raise VerifyError(f"{why}, which cannot be imported: {reason}; pip install 'quantexp[te]'")
    if not torch.cuda.is_available():
        raise VerifyError(f"{why}, and this machine has no GPU")
    return conform(torch.device("cuda"))


def conform(device: torch.device) -> Outcome:
    """Compare every recipe that Transformer Engine runs here, on tensors of a device."""
    version = str(importlib.import_module("transformer_engine").__version__)
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    rows: list[Row] = []
    absent = {}
    for subject in subjects():
        available, reason = getattr(pytorch, subject.support)(return_reason=True)
        if available:
            rows += _rows(subject, device, _numbers(version))
        else:
            absent[subject.name] = str(reason)
    return Outcome(version, rows, absent)


def _rows(subject: Subject, device: torch.device, version: tuple[int, ...]) -> Iterator[Row]:
    for operand, quantizer in _quantizers(subject, device).items():
        spec = subject.formats[operand]
        quantizer.set_usage(rowwise=True, columnwise=True)
        rows = {
            axis: Row(subject.name, operand, spec.fmt.name, copy) for axis, copy in COPIES.items()
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


def _quantizers(subject: Subject, device: torch.device) -> dict[str, Any]:
    """The quantizers of a linear layer's operands."""
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    layer = pytorch.Linear(_WIDTH, _WIDTH, bias=False, params_dtype=torch.bfloat16, device=device)
    with pytorch.fp8_autocast(enabled=True, fp8_recipe=subject.make(recipes)):
        layer.init_fp8_metadata()
    x, w, *_ = layer.quantizers["scaling_fwd"]
    return {"x": x, "w": w, "g": layer.quantizers["scaling_bwd"][0]}


def _current(recipes: Any, power_of_two: bool) -> Any:
    """Only attributes reach the quantizers of a layer: the recipe's own keyword has no effect (version 2.11)."""
    recipe = recipes.Float8CurrentScaling()
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, recipes.QParams(power_2_scale=power_of_two))
    return recipe


def normal_tensors() -> Iterator[tuple[str, Tensor]]:
    """Matrices of normal values, whose extents are multiples of 128, with names."""
    generator = torch.Generator().manual_seed(_SEED)
    normal = torch.randn(1024, 512, generator=generator)
    yield "normal values in bfloat16", normal.to(torch.bfloat16)
    yield "normal values in float32", normal
    spread = normal * torch.exp(2 * torch.randn(1024, 1, generator=generator))
    yield "rows of many magnitudes", spread.to(torch.bfloat16)


def finite_tensors() -> Iterator[tuple[str, Tensor]]:
    """As `tensors_with_nonfinite`, with zeros for NaN and Inf."""
    for name, x in tensors_with_nonfinite():
        yield name, x.nan_to_num(0.0, 0.0, 0.0)


def tensors_with_nonfinite() -> Iterator[tuple[str, Tensor]]:
    """Also every 16-bit value, and blocks of 32 around every threshold of the scales."""
    yield from normal_tensors()
    yield "every bfloat16 value by magnitude", _matrix(cases.by_magnitude("bfloat16", _WIDTH))
    yield "every bfloat16 value, shuffled", _matrix(cases.shuffled("bfloat16", _WIDTH))
    for name in ("mxfp8_e4m3", "mxfp8_e5m2"):
        hard = torch.from_numpy(cases.hard_blocks(name, "rceil")).flatten()
        rows = hard.numel() // _WIDTH // _WIDTH * _WIDTH
        yield f"ties and thresholds of {name}", hard[: rows * _WIDTH].view(rows, _WIDTH)


def _matrix(values: Any) -> Tensor:
    return torch.from_numpy(values).to(torch.bfloat16)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
