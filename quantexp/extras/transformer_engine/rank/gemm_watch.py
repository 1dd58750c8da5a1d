"""Observes the products of Transformer Engine's linear layers at the one function that computes them.

Its native functions are no operators of torch, so that no `TorchDispatchMode` sees them. `generic_gemm` of
`transformer_engine_torch` computes every product of a linear layer (pytorch/cpp_extensions/gemm.py), and is called
with both operands and with which of them is transposed:

    fprop   (w, True, x, False)      dgrad   (w, False, g, False)      wgrad   (x, False, g, True)

Here it is replaced while an iteration is watched. Hooks on the modules and on the autograd nodes of their forward
passes say whose product it is, and hold the tensors before quantisation, with which `quantexp.proof` compares the bytes
that arrive. Grouped products, which no layer of quantexp calls, fail the run inside a decoder layer. Products of custom
recipes are torch's own, and the `ProductWatch` sees them.

Under sequence parallelism a column layer gathers x, and a row layer g, from the ranks that share it: quantised before
or, under a custom recipe, after. Captures and the proof gather the tensor before quantisation once more.

Not seen: the inside of cuDNN's fused attention, and products replayed from CUDA graphs. No scheme's slots are there, as
quantexp takes neither.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from quantexp.extras.transformer_engine.proof.conformity import finding_of, other_shape
from quantexp.extras.transformer_engine.proof.stored import read
from quantexp.formats import QuantSpec
from quantexp.formats.torch_internals import in_backward
from quantexp.proof.bits import num_unequal
from quantexp.proof.diagnosis import instead
from quantexp.proof.findings import Finding, Status
from quantexp.proof.verdict import compared
from quantexp.proof.watch import ProductWatch
from quantexp.quant.precision import Entry, ModuleId
from quantexp.quant.product_context import untracked
from quantexp.quant.sites import Operand, Product, Site, operands_of
from quantexp.training.megatron.token_exchange import Exchange

_NATIVE = "transformer_engine_torch"
_GEMM, _GROUPED = "generic_gemm", "te_general_grouped_gemm"
#: Multiplies signs and a Hadamard matrix, by torch, when the first quantizer of NVFP4 is made.
_CONSTANTS = ("transformer_engine.pytorch.tensor.nvfp4_tensor", "get_rht_matrix")
#: The autograd node of a linear layer's forward pass.
_NODE = "_LinearBackward"


@dataclass(frozen=True)
class _Running:
    """The forward or backward pass of a module, and its operands before quantisation as matrices [rows, width]."""

    module: ModuleId
    sources: Mapping[Operand, Tensor]
    is_backward: bool


def watching(
    products: ProductWatch, modules: Mapping[ModuleId, nn.Module]
) -> contextlib.AbstractContextManager[None]:
    """Watch the products of these modules for a `ProductWatch`."""
    return GemmWatch(products, modules).watching()


class GemmWatch:
    """Judges the operands of these modules' products into what a `ProductWatch` observes."""

    def __init__(self, products: ProductWatch, modules: Mapping[ModuleId, nn.Module]) -> None:
        self._products = products
        self._modules = modules
        self._running: list[_Running] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every product that is called inside."""
        if not self._modules:
            yield
            return
        handles, replaced = [], []
        try:
            for home, name, replacement in self._replacements():
                original = getattr(home, name)
                replaced.append((home, name, original))
                setattr(home, name, partial(replacement, original))
            for module_id, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(partial(self._enter, module_id)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for home, name, original in replaced:
                setattr(home, name, original)
            self._running.clear()

    def _replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Module, name of a function, and what is called instead, with the function as its first argument."""
        native, constants = (importlib.import_module(name) for name in (_NATIVE, _CONSTANTS[0]))
        yield native, _GEMM, self._gemm
        for name in [name for name in dir(native) if name.startswith(_GROUPED)]:
            yield native, name, partial(self._undeclared, name)
        yield constants, _CONSTANTS[1], _unwatched

    def _enter(self, name: ModuleId, module: nn.Module, args: tuple[Any, ...]) -> None:
        sources = {
            Operand.X: _source(module, Operand.X, args[0]),
            Operand.W: _matrix(module.weight),
        }
        self._running.append(_Running(name, sources, is_backward=False))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        forward = self._running.pop()
        tensors = [x for x in _flat(output) if x.grad_fn is not None]
        stop = {x.grad_fn for x in _flat(args)}
        node = next(filter(None, (_linear_node(x.grad_fn, stop) for x in tensors)), None)
        if node is None:
            return

        def enter(grads: tuple[Tensor, ...]) -> None:
            sources = {**forward.sources, Operand.G: _source(module, Operand.G, grads[0])}
            self._running.append(_Running(forward.module, sources, is_backward=True))

        def leave(of_inputs: tuple[Any, ...], grads: tuple[Any, ...]) -> None:
            self._running.pop()

        node.register_prehook(enter)
        node.register_hook(leave)

    def _gemm(
        self,
        original: Callable[..., Any],
        a: Any,
        transa: bool,
        b: Any,
        transb: bool,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if not self._running:
            return self._undeclared(_GEMM, original, a, transa, b, transb, *rest, **options)
        running = self._running[-1]
        product = Product.FPROP
        if running.is_backward:
            product = Product.WGRAD if transb else Product.DGRAD
        precision = self._products.observed.declared[running.module]
        recomputed = product is Product.FPROP and in_backward()
        axes = (0 if transb else -1, -1 if transa else 0)
        slots = operands_of(Site.LINEAR, product)
        for slot, x, axis in zip(slots, (b, a), axes, strict=True):
            spec = precision.spec(slot)
            finding = judge_operand(x, spec, axis, running.sources[slot.operand])
            self._products.observed.note(Entry(running.module, slot, spec), finding, recomputed)
        return _unwatched(original, a, transa, b, transb, *rest, **options)

    def _undeclared(
        self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        owner = self._products.owner()
        if owner is not None:
            self._products.observed.undeclared[owner, f"{_NATIVE}.{name}"] += 1
        return _unwatched(original, *args, **kwargs)


def _unwatched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with untracked():
        return original(*args, **kwargs)


def _source(module: nn.Module, operand: Operand, own: Tensor) -> Tensor:
    return _matrix(whole_tokens(module, operand, own))


def _matrix(x: Any) -> Tensor:
    tensor: Tensor = x.detach()
    return tensor.reshape(-1, tensor.shape[-1])


def _flat(value: Any) -> Iterator[Tensor]:
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, Tensor):
            yield each


def _linear_node(start: Node | None, stop: set[Node | None]) -> Node | None:
    """The node of the layer's products between its output and its inputs."""
    todo, seen = [start], set(stop)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == _NODE:
            return node
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return None


#: The layers, by `parallel_mode`, that gather an operand.
_GATHERED_BY = {Operand.X: "column", Operand.G: "row"}


def whole_tokens(module: Any, operand: Operand, own: Tensor) -> Tensor:
    """The operand as the layer's products take it; all ranks that share the layer call this at the same point.

    `own` is what this rank has, its first dimension the tokens; it is detached.
    """
    own = own.detach()
    if not module.sequence_parallel or module.parallel_mode != _GATHERED_BY.get(operand):
        return own
    return Exchange(module.tp_group, divides_tokens=True).start_gather(own).wait()


def judge_operand(x: Any, spec: QuantSpec, axis: int, source: Tensor) -> Finding:
    """Compare an operand with its declaration and with the tensor that it was quantised from.

    Args:
        x: the operand, stored by Transformer Engine, or plain.
        spec: its declaration.
        axis: the dimension of the matrix [M, K] that the product reduces, -1 or 0.
        source: the matrix before quantisation, gathered as x was.
    """
    try:
        stored = read(x, axis)
    except ValueError as error:
        return Finding(Status.MISMATCH, f"{error}, which its product needs", quantised=True)
    if stored is not None:
        return finding_of(stored, spec, source)
    if spec.quantised:
        return Finding(
            Status.MISMATCH, f"it reached the product in {str(x.dtype).removeprefix('torch.')}"
        )
    matrix = x.detach().reshape(-1, x.shape[-1])
    if matrix.shape != source.shape:
        return other_shape(matrix, source)
    return compared(matrix, source, spec, axis, num_unequal(matrix, source), instead)
