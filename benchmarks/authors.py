"""Compares formats with the code of their authors, which is read from clones of yours and runs on a CPU.

    git clone https://github.com/mit-han-lab/fouroversix; git -C fouroversix checkout dadfad6
    git clone https://github.com/IST-DASLab/Quartet-II; git -C Quartet-II checkout 8776a90
    git clone https://github.com/global-computing-consortium/HiFloat4; git -C HiFloat4 checkout 6d937b6
    python benchmarks/authors.py fouroversix Quartet-II HiFloat4

It prints a digest of each of the authors' results, which `tests/formats/test_authors.py` has, and how many elements and
block scales differ from those of `quantexp.formats`. What imports a GPU, other packages or kernels is left out: modules
are executed alone, with `device="cuda"` replaced, and where they draw random numbers they are given those of quantexp.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quantexp.extras.verify.draws import random_integers  # noqa: E402
from quantexp.formats import quantise  # noqa: E402
from tests.formats.authors import BLOCK, CASES, SEED, codes, digest, in_units, source  # noqa: E402

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("fouroversix", "quartet2", "hifloat4"):
        parser.add_argument(name, type=Path)
    folders = parser.parse_args()
    results = {**four_over_six(folders.fouroversix), "ms-eden": drawn_ms_eden(folders.quartet2)}
    for name, (elements, scales) in results.items():
        own = codes(CASES[name])
        wrong = [int((a != b).sum()) for a, b in zip(own, (elements, scales), strict=True)]
        sys.stdout.write(
            f'    "{name}": "{digest(elements, scales)}",  # {wrong[0]} of {elements.numel():,} elements and '
            f"{wrong[1]} of {scales.numel():,} scales differ\n"
        )
    x = source()
    theirs, ours = hifloat4(folders.hifloat4, x), quantise(x, "hifloat4")
    errors = [float((y - x).square().mean()) for y in (theirs, ours)]
    sys.stdout.write(
        f"hifloat4: {float((theirs != ours).float().mean()):.2%} of the values differ; mean squared error "
        f"{errors[0]:.5f} there, {errors[1]:.5f} here\n"
    )


def module_of(file: Path, name: str) -> Any:
    """A module of a file under a name; packages that it imports from must be in sys.modules."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def packages(*names: str) -> None:
    """Empty packages with these names."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []


def uniform(per_block: bool = False) -> Tensor:
    """The random numbers of quantexp in (0, 1], so that below f is up: those of elements, or of blocks' first ones."""
    integers = random_integers(source().numel(), SEED, 0).reshape(source().shape)
    integers = integers[:, ::BLOCK] if per_block else integers
    return torch.from_numpy((integers.astype("float64") + 1) / 2**24)


def reference_of(folder: Path) -> Any:
    """The module of fouroversix's reference in torch."""
    package = folder / "src" / "fouroversix"
    packages("fouroversix", "fouroversix.kernels", "fouroversix.quantize", "fouroversix.pytorch")
    module_of(package / "utils.py", "fouroversix.utils")
    module_of(package / "kernels" / "constants.py", "fouroversix.kernels.constants")
    module_of(package / "quantize" / "utils.py", "fouroversix.quantize.utils")
    module_of(package / "quantize" / "pytorch" / "fp6.py", "fouroversix.pytorch.fp6")
    return module_of(
        package / "quantize" / "pytorch" / "reference.py", "fouroversix.pytorch.reference"
    )


def four_over_six(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Elements and scales of the reference in torch."""
    reference = reference_of(folder)
    rules, styles = reference.ScaleRule, reference.RoundStyle
    words = {"mse": rules.mse, "mae": rules.mae, "max": rules.abs_max}
    results = {}
    for name in CASES:
        if name == "ms-eden":
            continue
        rule = next((r for word, r in words.items() if name.endswith(word)), rules.mse)
        rule = rules.static_6 if name.startswith("nvfp4") else rule
        is_if4, is_drawn = name.startswith("if4"), CASES[name].is_drawn
        options: dict[str, Any] = {
            "fp4_format": reference.DataType.if4 if is_if4 else reference.DataType.nvfp4,
            "scale_rule": rule,
            "round_style": styles.stochastic if is_drawn else styles.nearest,
            "block_scale_2d": name.endswith("tiles"),
            "use_blackwell_scale_layout": False,
        }
        with _rounded_up_at(1 - uniform().float()), _range_of(styles, name.endswith("16/17")):
            packed, scales, _ = reference.quantize(source(), **options)
        elements, blocks = unpacked(packed, scales)
        results[name] = in_units(elements), blocks
    return results


@contextmanager
def _rounded_up_at(numbers: Tensor) -> Iterator[None]:
    """`rand_like` in place of a generator: the reference rounds x + r - 1/2, so up from r = 1 - f on."""
    with patch.object(torch, "rand_like", lambda x, **_: numbers.reshape(x.shape)):
        yield


@contextmanager
def _range_of(styles: Any, is_unbiased: bool) -> Iterator[None]:
    """The factor 16/17 of `stochastic_unbiased` with rounding to nearest, if it is asked for."""
    factor = property(lambda _: 16 / 17)
    with patch.object(
        styles, "adjustment_factor", factor if is_unbiased else styles.adjustment_factor
    ):
        yield


def unpacked(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Elements and scales of blocks, of fouroversix's codes."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int64)
    floats = torch.tensor([*E2M1, *(-value for value in E2M1)])[nibbles]
    integers = (nibbles - 16 * (nibbles > 7)) * (6 / 7)
    scales = scales.reshape(len(packed), -1)
    is_integer = (scales.view(torch.uint8) > 127).repeat_interleave(BLOCK, dim=1)
    return torch.where(is_integer, integers, floats), scales.float().abs()


def eden_of(folder: Path) -> Any:
    """The module of Quartet II's quantizer MS-EDEN."""
    quantizers = folder / "src" / "models" / "quantization" / "quantizers"
    packages("models", "models.quantization", "models.quantization.quantizers")
    for name in ("scipy", "fast_hadamard_transform", "models.quantization.quantizers.nvfp4_triton"):
        sys.modules[name] = MagicMock()
    for name in ("scipy.integrate", "scipy.stats"):
        sys.modules[name] = MagicMock()
    module_of(quantizers / "base.py", "models.quantization.quantizers.base")
    tensor = torch.tensor
    with patch.object(torch, "tensor", lambda *a, device=None, **k: tensor(*a, **k)):
        return module_of(quantizers / "eden.py", "models.quantization.quantizers.eden")


def ms_eden(eden: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Elements, scales of blocks and of the tensor by the authors' functions, in their order; no transform."""
    own = eden.EdenSRQuantizer.__new__(eden.EdenSRQuantizer)
    torch.nn.Module.__init__(own)
    # round_scales has the factor 17/16 itself.
    own.scale_dtype, own.scale_override = "e4m3", 0.93
    blocks = x.view(-1, BLOCK)
    scales, t = own.round_scales(blocks.abs().max(dim=-1, keepdim=True)[0], "eden")
    v = blocks / scales / t
    q = eden.rtn_fp4(v, eden.EdenSRQuantizer.grid)
    groups_v, groups_q = v.view(-1, 32), q.view(-1, 32)
    correction = (groups_v**2).sum(-1, keepdim=True) / (groups_v * groups_q).sum(-1, keepdim=True)
    drawn = own.apply_correction(scales, correction)
    return q.view_as(x), drawn.reshape(len(x), -1), t


def drawn_ms_eden(folder: Path) -> tuple[Tensor, Tensor]:
    """Elements and scales with the random numbers of quantexp."""
    numbers = uniform(per_block=True)
    with patch.object(torch, "bernoulli", lambda p: (numbers.reshape(p.shape) <= p).float()):
        elements, scales, _ = ms_eden(eden_of(folder), source())
    return in_units(elements), scales


def hifloat4(folder: Path, x: Tensor) -> Tensor:
    """The values of the published conversion in Python."""
    packages("hif4", "hif4.base", "hif4.base.QFuncs", "hif4.base.QType")
    sys.modules["hif4.base.QType"].QType = types.SimpleNamespace  # type: ignore[attr-defined]
    file = folder / "hif4_gpu" / "quant_cy" / "base" / "QFuncs" / "hifx.py"
    module = module_of(file, "hif4.base.QFuncs.hifx")
    values: Tensor = module.quant_hifx(x, types.SimpleNamespace(exp_bits=0, man_bits=3), -1)
    return values


if __name__ == "__main__":
    main()
