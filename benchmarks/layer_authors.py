"""Compares linear layers with the code of the recipes' authors, which is read from clones of yours and runs on a CPU.

    git clone https://github.com/IST-DASLab/Quartet-II; git -C Quartet-II checkout 8776a90
    git clone https://github.com/mit-han-lab/fouroversix; git -C fouroversix checkout dadfad6
    python benchmarks/layer_authors.py Quartet-II fouroversix

Quartet-II has its own layer, TetraJet-v2's and NVIDIA's recipe; fouroversix has a layer in torch. For each recipe and
sample a line says how many of an operand's codes (`tests/quant/authors.py`) differ, and how far y, dx and dw are away,
in parts of their norm; a digest of the authors' codes follows, which `tests/quant/test_authors.py` has.

Their random signs are those of the product that is compared, and their draws those of quantexp. Triton's interpreter
runs their kernels, with torch's casts to float8 in place of its own (`findings/triton_interpreter_fp8.sh`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch
import triton
import triton.language as tl
from authors import module_of, packages
from torch import Tensor
from triton.runtime import interpreter

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quantexp.extras.verify.draws import random_integers  # noqa: E402
from quantexp.formats import quantise  # noqa: E402
from quantexp.formats.definitions.definition import declared_format  # noqa: E402
from quantexp.formats.definitions.files import shipped_formats  # noqa: E402
from tests.quant.authors import (  # noqa: E402
    ITERATION,
    MODULE,
    RECIPES,
    RUN,
    SLOTS,
    codes,
    digest,
    layer,
    sources,
)

#: Operands by slot, and y, dx and dw.
Layer = tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]
NUM_SAMPLES = 4
BLOCK = 16
NUM_DRAWS = 400
_FOUR_OVER_SIX = shipped_formats()["nvfp4_four_over_six"]


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("quartet2", "fouroversix"):
        parser.add_argument(name, type=Path)
    folders = parser.parse_args()
    theirs = {
        **quartet2(folders.quartet2),
        "linear_nvfp4_four_over_six": fouroversix(folders.fouroversix),
    }
    for recipe in RECIPES:
        for sample in range(NUM_SAMPLES):
            operands, results = theirs[recipe](sample)
            own, own_results = layer(recipe, sample)
            if recipe == "linear_nvfp4_four_over_six":
                seed = _hashed(f"{RUN} {MODULE} linear.dgrad.g")
                drawn = by_drawn_errors(sources(sample)[2].squeeze(1), seed, ITERATION << 32)
                other = int((codes(drawn) != codes(operands["dgrad.g"])).sum())
                sys.stdout.write(f"dgrad.g, if the drawn errors choose: {other} codes differ\n")
            wrong = {s: int((codes(own[s]) != codes(operands[s])).sum()) for s in SLOTS}
            far = [
                float((a - b).norm() / b.norm()) for a, b in zip(own_results, results, strict=True)
            ]
            differing = ", ".join(f"{n} of {s}" for s, n in wrong.items() if n) or "none"
            sys.stdout.write(
                f"{recipe}, sample {sample}: codes that differ: {differing} of "
                f"{sum(x.numel() for x in operands.values()):,}; y, dx, dw: {', '.join(f'{x:.1e}' for x in far)}\n"
            )
            if sample == 0:
                for slot in SLOTS:
                    sys.stdout.write(f'    "{slot}": "{digest(operands[slot])}",\n')
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    rounded = partial(quantise, x, _FOUR_OVER_SIX, rounding="stochastic")
    for words, of in (
        ("to nearest", lambda seed: rounded(seed=seed)),
        ("of the drawn values", lambda seed: by_drawn_errors(x, seed)),
    ):
        squared, bias = errors(of, x)
        sys.stdout.write(
            f"four over six chosen by the errors {words}: mean squared error {squared:.5f}, squared bias {bias:.6f}\n"
        )


def numbers(slot: str, sample: int) -> Tensor:
    """The uniform numbers in (0, 1] of an operand, so that below f is up, as the authors lay it: blocks along rows."""
    x, w, g = sources(sample)
    shape = {"x": x, "w": w, "g": g}[slot[-1]].squeeze(1).shape
    words = f"{RUN} {MODULE} linear.{slot}"
    integers = random_integers(shape.numel(), _hashed(words), ITERATION << 32).reshape(shape)
    uniform = torch.from_numpy((integers.astype("float64") + 1) / 2**24).float()
    return (uniform if slot in ("fprop.x", "fprop.w", "dgrad.g") else uniform.T).contiguous()


def signs(product: str, size: int) -> Tensor:
    """Of the random transform of a product's operands."""
    integers = random_integers(size, _hashed(f"{RUN} {MODULE} linear.{product}"), ITERATION << 32)
    return torch.from_numpy(np.where(integers < 1 << 23, 1.0, -1.0)).float()


def _hashed(words: str) -> int:
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big")


def quartet2(folder: Path) -> dict[str, Callable[[int], Layer]]:
    """The layers of Quartet-II, by our files' names."""
    root, models = folder / "src" / "models" / "quantization", "models.quantization"
    packages("models", models, f"{models}.quantizers", f"{models}.schemes")
    with (
        patch.object(torch, "compile", lambda **_: lambda f: f),
        patch.object(triton, "autotune", _first),
    ):
        module_of(root / "quantizers" / "nvfp4_triton.py", f"{models}.quantizers.nvfp4_triton")
        schemes = {
            name: module_of(root / "schemes" / f"{name}.py", f"{models}.schemes.{name}")
            for name in ("quartet_2", "nvidia", "tetrajetv2")
        }
    drawn = ("dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
    own = {
        "linear_nvfp4_recipe": ("nvidia", "Nvidia", "_fn", "Linear", drawn[::2], 16, {}),
        "linear_nvfp4_tetrajet_v2": ("tetrajetv2", "TetraJetV2", "_fn", "Linear", drawn, 32, {}),
        "linear_nvfp4_quartet2": (
            *("quartet_2", "Quartet_II", "_fn", "_Linear", drawn, 32, {"four_over_six": True}),
        ),
    }
    return {
        recipe: partial(
            _of_quartet2,
            schemes[name],
            getattr(schemes[name], word + function),
            partial(getattr(schemes[name], word + kind), bias=False, hadamard_dim=size, **more),
            slots,
            size,
        )
        for recipe, (name, word, function, kind, slots, size, more) in own.items()
    }


def _of_quartet2(
    scheme: Any, function: Any, kind: Any, drawn: tuple[str, ...], size: int, sample: int
) -> Layer:
    """A layer's passes with the signs of dgrad, whose dx is taken, and with those of wgrad."""
    x, w, g = sources(sample)
    passes = {}
    for product in ("dgrad", "wgrad"):
        products: list[tuple[Tensor, Tensor]] = []
        function.hadamard_matrix = None
        with ExitStack() as stack:
            stack.enter_context(_drawing(scheme, drawn, sample))
            stack.enter_context(_on_a_cpu(signs(product, size)))
            stack.enter_context(patch.object(torch.nn.functional, "linear", _recorded(products)))
            passes[product] = products, *_passes(kind(w.shape[1], w.shape[0]), x, w, g)
    products, y, dx, _ = passes["dgrad"]
    (x_1, w_1), (g_2, w_2), _ = products
    g_3, x_3 = passes["wgrad"][0][2]
    operands = dict(zip(SLOTS, (x_1[0], w_1, g_2, w_2.T, g_3.T, x_3.T), strict=True))
    return operands, (y, dx, passes["wgrad"][3])


def _passes(module: Any, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw."""
    module.weight.data.copy_(w)
    source: Any = x.transpose(0, 1).clone().requires_grad_()
    y: Tensor = module(source)
    y.backward(g.transpose(0, 1))  # type: ignore[no-untyped-call]
    return y.detach()[0], source.grad[0], module.weight.grad


def _recorded(products: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    linear = torch.nn.functional.linear

    def record(left: Tensor, right: Tensor, _: None = None) -> Tensor:
        products.append((left.detach().clone(), right.detach().clone()))
        return linear(left, right)

    return record


@contextmanager
def _on_a_cpu(own_signs: Tensor) -> Iterator[None]:
    """`device="cuda"` is a CPU, signs are these, and casts to float8 those of torch."""
    tensor = torch.tensor
    with (
        patch.object(torch, "tensor", lambda *a, device=None, **k: tensor(*a, **k)),
        patch.object(torch, "randint", lambda *_, **__: (own_signs + 1) / 2),
        patch.object(interpreter, "_convert_float", _cast),
    ):
        yield


@contextmanager
def _drawing(scheme: Any, drawn: tuple[str, ...], sample: int) -> Iterator[None]:
    """The kernels that draw get the numbers of one slot after another; those of MS-EDEN draw one a block."""
    slots, current = iter(drawn), [torch.empty(0)]

    def rand(_: Any, offsets: Any) -> Any:
        own, at = current[0].numpy().reshape(-1), offsets.handle.data
        numbers_of_block = tl.zeros(offsets.shape, tl.float32)
        numbers_of_block.handle.data = own[np.minimum(at, own.size - 1)]
        return numbers_of_block

    is_eden = hasattr(scheme, "eden_1x16s_fp4_kernel_wrapper")
    name = f"{'eden' if is_eden else 'sr'}_1x16s_fp4_kernel_wrapper"
    kernel = getattr(scheme, name)

    def with_numbers(*args: Any) -> Any:
        own = numbers(next(slots), sample)
        current[0] = own[:, ::BLOCK].contiguous() if is_eden else own
        return kernel(*args)

    with patch.object(scheme, name, with_numbers), patch.object(tl, "rand", rand):
        yield


def _first(configs: Any, **_: Any) -> Callable[[Any], Any]:
    """In place of Triton's autotuner: the first configuration."""
    own = configs[0].kwargs

    class Tuned:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Callable[[Any], Any]) -> Callable[..., None]:
            return lambda **keywords: self.kernel[grid(own)](**keywords, **own)

    return Tuned


def _cast(x: Any, source: Any, target: Any, _: Any) -> Any:
    """Between float32 and float8, as torch has it."""
    if str(target) == "fp8e4nv":
        return torch.from_numpy(np.array(x)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert str(source) == "fp8e4nv", source
    values = torch.from_numpy(np.array(x).view(np.uint8)).view(torch.float8_e4m3fn).float()
    return values.numpy().view(np.uint32)


def fouroversix(folder: Path) -> Callable[[int], Layer]:
    """The layer of fouroversix: four over six by mse, weights in blocks of 16 x 16."""
    version = importlib.metadata.version
    sys.path.insert(0, str(folder / "src"))
    with patch.object(
        importlib.metadata,
        "version",
        lambda name: "1.1" if name == "fouroversix" else version(name),
    ):
        linear: Any = importlib.import_module("fouroversix.model.modules.linear")
        backend: Any = importlib.import_module("fouroversix.quantize.pytorch.backend")
    config = importlib.import_module("fouroversix.model.config").ModuleQuantizationConfig(
        quantize_backend="pytorch",
        matmul_backend="pytorch",
        keep_master_weights=True,
        output_dtype="float32",
        weight_scale_2d=True,
    )
    quantise = backend.PyTorchQuantizeBackend.quantize.__func__
    order = "fprop.w", "fprop.x", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x"

    def of(sample: int) -> Layer:
        x, w, g = sources(sample)
        found, slots = {}, iter(order)
        had = torch.diag(signs("wgrad", 16)) @ _sylvester(16) / 4

        def record(cls: Any, source: Tensor, own: Any) -> Any:
            slot = next(slots)
            drawn = 1 - numbers(slot, sample)
            with patch.object(torch, "rand_like", lambda like, **_: drawn.reshape(like.shape)):
                quantised = quantise(cls, source, own)
            values = linear.dequantize(quantised, torch.float32)
            found[slot] = values.T if slot in ("dgrad.w", "wgrad.g", "wgrad.x") else values
            return quantised

        with (
            patch.object(backend.PyTorchQuantizeBackend, "quantize", classmethod(record)),
            patch.object(backend, "get_rht_matrix", lambda: had),
        ):
            plain = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
            results = _passes(linear.FourOverSixLinear(plain, config), x, w, g)
        return {slot: found[slot] for slot in SLOTS}, results

    return of


def by_drawn_errors(x: Tensor, seed: int, offset: int = 0) -> Tensor:
    """x in four over six where the scale is chosen by the errors of the drawn values, as fouroversix has it."""
    drawn = []
    for candidate in (6.0, 4.0):
        content = json.loads(_FOUR_OVER_SIX.definition) | {"candidates": [candidate]}
        del content["choose"]
        fmt = declared_format(f"nvfp4_{candidate:.0f}", content)
        drawn.append(quantise(x, fmt, rounding="stochastic", seed=seed, offset=offset))
    six, four = (
        (q - x).square().reshape(len(x), -1, BLOCK).sum(-1).repeat_interleave(BLOCK, dim=1)
        for q in drawn
    )
    return torch.where(six <= four, drawn[0], drawn[1])


def errors(of: Callable[[int], Tensor], x: Tensor) -> tuple[float, float]:
    """The mean squared error of draws by a seed, and the squared bias, without bias."""
    total, squared = torch.zeros(x.shape, dtype=torch.float64), 0.0
    for seed in range(NUM_DRAWS):
        difference = of(seed).double() - x
        total += difference
        squared += float(difference.square().mean()) / NUM_DRAWS
    noise = (squared - float((total / NUM_DRAWS).square().mean())) / (NUM_DRAWS - 1)
    return squared, float((total / NUM_DRAWS).square().mean()) - noise


def _sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


if __name__ == "__main__":
    main()
