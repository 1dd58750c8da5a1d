"""A rank's parts of a model as the proof of engagement sees them: layers, routers, modules of the map."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from quantexp.model.decoder import OUTPUT
from quantexp.proof.merging import merged
from quantexp.proof.verdict import Verdict, verdict
from quantexp.proof.watch import ProductWatch
from quantexp.quant.precision import ModuleId, PrecisionMap
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.experts import moe_layers
from quantexp.training.megatron.model import SchemeModule, linear_weights, scheme_modules
from quantexp.training.megatron.transformer_engine.gemm_watch import GemmWatch


class Watched:
    """The parts of a rank's chunks, by the names that messages have."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        #: With an output layer of the map.
        self.decoder: dict[str, nn.Module] = {}
        self.routers: dict[str, nn.Module] = {}
        self.modules: dict[ModuleId, SchemeModule] = {}
        self.weights: dict[ModuleId, Any] = {}
        for chunk in chunks:
            layers = chunk.decoder.layers
            self.decoder |= {f"layer {layer.layer_number - 1}": layer for layer in layers}
            routers = {f"layer {n} router": moe.router for n, moe in moe_layers(chunk).items()}
            self.routers |= routers
            modules: dict[ModuleId, Any] = {**scheme_modules(chunk)}
            self.modules |= modules
            self.weights |= linear_weights(chunk)
            self.decoder |= {str(n): m for n, m in modules.items() if n.name == OUTPUT}
        #: Modules whose products Transformer Engine computes, which have its quantizers.
        self.native: dict[ModuleId, Any] = {
            n: m for n, m in self.modules.items() if hasattr(m, "fp8_meta")
        }

    @contextlib.contextmanager
    def proving(self, iteration: int, declared: PrecisionMap) -> Iterator[Callable[[], Verdict]]:
        """Watch the products inside; the function gives the verdict of all ranks, which all call it, afterwards."""
        watch = ProductWatch(
            {name: declared[name] for name in self.modules}, self.decoder, self.routers
        )
        with watch.watching(), GemmWatch(watch, self.native).watching():
            yield lambda: merged(declared, gather(verdict(iteration, watch.observed)))
