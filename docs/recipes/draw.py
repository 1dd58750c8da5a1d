"""The picture of docs/recipes.md: errors of the three products of linear layers under every recipe, from one capture.

    python docs/recipes/draw.py [FOLDER]

It trains `tiny` in bf16 on the synthetic data for 100 iterations, captures the last one, and multiplies the captured
inputs, weights and gradients of all linear layers again under each scheme of `conf/quant/more` that quantises them. An
error is the squared distance to the product in float64 over its squared length, and the mean over all layers; rules for
some layers or some of the training are left out. Some minutes on 2 cores. The run stays in FOLDER, a temporary one by
default.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from quantexp.capture import open_capture
from quantexp.config.compose import compose
from quantexp.folders import conf_dir
from quantexp.quant.linear import dgrad, fprop, wgrad
from quantexp.quant.multiply import turned_back
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.sites import DGRAD_W, WGRAD_X
from quantexp.quant.step_state import StepState, use_step_state

HERE = Path(__file__).parent
ITERATIONS = 100
RUN = [
    *("model=tiny", "dataset=synthetic", "quant=bf16", "capture=tensors"),
    *(f"training.iterations={ITERATIONS}", f"capture.iterations=[{ITERATIONS}]"),
    *("training.global_batch_size=2", "training.micro_batch_size=2", "training.seq_length=256"),
    *("training.warmup_iterations=10", "tracking.tensorboard=false"),
]
PRODUCTS = {"fprop": ("#0072B2", "o"), "dgrad": ("#D55E00", "s"), "wgrad": ("#009E73", "^")}
#: Input, weight and gradient of a module.
Operands = tuple[ModuleId, Tensor, Tensor, Tensor]


def main() -> None:
    """Train, multiply, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="keeps the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        words = [*RUN, f"paths.root={folder}"]
        subprocess.run([sys.executable, "-m", "quantexp", *words], check=True, cwd=folder)
        (tensors,) = folder.glob("*/tensors")
        operands = list(captured(tensors))
        errors = {
            file.stem: errors_under(f"more/{file.stem}", operands)
            for file in sorted((conf_dir() / "quant" / "more").glob("linear_*.yaml"))
        }
    for name, each in sorted(errors.items(), key=lambda item: sum(item[1])):
        sys.stdout.write(f"{name}  {'  '.join(f'{error:.2e}' for error in each)}\n")
    draw(errors).savefig(HERE / "errors.png")


def captured(folder: Path) -> Iterator[Operands]:
    """What every linear layer of the decoder multiplied, in float32."""
    capture = open_capture(folder)
    entries = {
        tuple(entry.metadata[key] for key in ("layer", "module", "tensor")): entry
        for entry in capture.with_values()
    }
    for layer, module, tensor in entries:
        if tensor == "input":
            x, w, g = (
                entries[layer, module, name].torch().bfloat16()
                for name in ("input", "weight", "grad_output")
            )
            yield ModuleId(int(layer), str(module)), x, w, g


def errors_under(scheme: str, operands: list[Operands]) -> list[float]:
    """The mean error of each product."""
    experiment = compose(["model=tiny", f"quant={scheme}"])
    experiment.quant.rules = [
        rule
        for rule in experiment.quant.rules
        if not (rule.layers or rule.iterations or rule.share or rule.when)
    ]
    declared = precision_map(experiment.model, experiment.quant)
    sums = torch.zeros(len(PRODUCTS), dtype=torch.float64)
    with use_step_state(StepState(seed=1)) as state:
        state.begin(1, 0)
        for name, x, w, g in operands:
            sums += torch.tensor(errors_of(declared[name], x, w, g), dtype=torch.float64)
    return [float(each) for each in sums / len(operands)]


def errors_of(precision: ModulePrecision, x: Tensor, w: Tensor, g: Tensor) -> list[float]:
    """The errors of the three products of a layer."""
    flat_x, flat_g = (tensor.reshape(-1, tensor.shape[-1]).double() for tensor in (x, g))
    exact = [flat_x @ w.double().t(), flat_g @ w.double(), flat_g.t() @ flat_x]
    products = [
        fprop(precision, x, w),
        turned_back(precision, DGRAD_W, dgrad(precision, g, w)),
        turned_back(precision, WGRAD_X, wgrad(precision, g, x)),
    ]
    return [
        float((made.reshape(true.shape).double() - true).square().sum() / true.square().sum())
        for made, true in zip(products, exact, strict=True)
    ]


def draw(errors: dict[str, list[float]]) -> Figure:
    """A row a scheme, the smallest sum of errors at the top."""
    names = sorted(errors, key=lambda name: -sum(errors[name]))
    figure = Figure(figsize=(8.5, 0.2 * len(names) + 1), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for number, (product, (colour, marker)) in enumerate(PRODUCTS.items()):
        values = [errors[name][number] for name in names]
        ax.plot(values, names, marker, color=colour, markersize=4.5, label=product)
    ax.set_xscale("log")
    ax.set_xlabel("squared error of the product, relative", fontsize=9)
    ax.tick_params(labelsize=7)
    ax.grid(axis="both", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.margins(y=0.01)
    ax.legend(fontsize=8, loc="lower left", frameon=False)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
