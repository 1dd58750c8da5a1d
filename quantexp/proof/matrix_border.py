"""The gradients of the weights that multiply or look up outside of the map, recomputed in float64 in some elements.

    output layer or router, y = x W^T      dW_rc = sum_t dy_tr x_tc
    embedding, y_t = row k_t of W          dW_rc = sum over t with k_t = r of dy_tc

A tied embedding has both. Rows are drawn, and those of some tokens besides. An implementation may round the sum of an
embedding's row after each token.

    # N tokens, R drawn rows of W, C drawn columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen
from quantexp.proof.draws import Moment, lines
from quantexp.proof.hooked import plain
from quantexp.proof.layer_pass import Claims
from quantexp.proof.products import Reference, flushed, reference
from quantexp.proof.vector_border import GradientBorder

#: Rows and columns that are compared, and tokens whose rows are.
_ROWS, _COLUMNS, _TOKENS = 16, 32, 16


class MatrixBorder(GradientBorder):
    """One weight while it is watched; its modules are added by `embeds`, `multiplies` and `routes`."""

    def __init__(self, *common: Any) -> None:
        """See `GradientBorder`."""
        super().__init__(*common)
        self._modules: list[Callable[[], None]] = []
        #: The rows that a pass compares.
        self._rows: tuple[Moment, Tensor] | None = None

    def _watch(self) -> None:
        for watch in self._modules:
            watch()

    def embeds(self, module: nn.Module) -> None:
        """The weight is the table of a Megatron-Core `VocabParallelEmbedding`."""
        hook = plain(partial(self._embedded, module))
        self._modules.append(lambda: self._hook(module.register_forward_hook(hook)))

    def multiplies(self, module: nn.Module) -> None:
        """The weight is that of an output layer."""

        def see(_: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
            if args[0].shape[:2] == output[0].shape[:2]:  # of all of its tokens
                self._multiplied(args[0], output[0])

        self._modules.append(lambda: self._hook(module.register_forward_hook(plain(see))))

    def routes(self, module: Any) -> None:
        """The weight is that of a router, whose `gating` gives its logits."""

        def watch() -> None:
            gating = module.gating

            def gate(x: Tensor) -> Tensor:
                logits: Tensor = gating(x)
                self._multiplied(x, logits)
                return logits

            module.gating = gate
            self._hook(_Undo(lambda: setattr(module, "gating", gating)))

        self._modules.append(watch)

    def _embedded(self, module: Any, _: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        tokens = args[0]
        if y.shape[: tokens.dim()] != tokens.shape or not self._learns_by(y):
            return
        moment = self._moment()
        with unseen():
            rows_N = tokens.flatten() - getattr(module, "vocab_start_index", 0)
            picked = lines(moment.choice("rows"), len(rows_N), 1, _TOKENS).to(rows_N.device)
            of_tokens = rows_N[picked]
            own = of_tokens[(of_tokens >= 0) & (of_tokens < len(self._parameter))]
            rows_R = torch.unique(torch.cat([self._drawn(moment)[0], own]))
            self._rows = moment, rows_R
            is_of_RN = (rows_N == rows_R[:, None]).double()

        def see(g: Tensor) -> None:
            _, columns_C = self._drawn(moment)
            g_NC = g.flatten(0, -2)[:, columns_C].double()
            values, magnitude = is_of_RN @ g_NC, is_of_RN @ g_NC.abs()
            counts_R1 = is_of_RN.sum(1, keepdim=True)
            lost = len(g_NC) * flushed(g_NC, g_NC[:0])
            rounded = values.abs() + counts_R1 * magnitude
            expected = Reference(values, rounded, magnitude, lost, roundings=2)
            self._expect(expected, (rows_R[:, None], columns_C), moment)

        self._on_gradient(y, see)

    def _multiplied(self, x: Tensor, y: Tensor) -> None:
        if not self._learns_by(y):
            return
        moment = self._moment()
        with unseen():
            rows_R, columns_C = self._drawn(moment)
            if self._rows is not None and self._rows[0] == moment:
                rows_R = self._rows[1]
            x_NC = x.detach().flatten(0, -2)[:, columns_C]

        def see(g: Tensor) -> None:
            expected = reference(g.flatten(0, -2)[:, rows_R].t(), x_NC)
            self._expect(expected, (rows_R[:, None], columns_C), moment)

        self._on_gradient(y, see)

    def _drawn(self, moment: Moment) -> tuple[Tensor, Tensor]:
        """The rows that are drawn in a pass, and the columns."""
        chosen, device = moment.choice(self._name, self._label), self._parameter.device
        rows, columns = self._parameter.shape
        own_rows, own_columns = lines(chosen, rows, 1, _ROWS), lines(chosen, columns, 1, _COLUMNS)
        return own_rows.to(device), own_columns.to(device)


class _Undo:
    """A handle that calls a function when it is removed."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


def router_borders(name: str, layer: nn.Module, *common: Any) -> Iterator[MatrixBorder]:
    """Those of the routers in a layer; the rest as in `GradientBorder`."""
    for path, module in layer.named_modules():
        if path.endswith("router") and hasattr(module, "gating"):
            border = MatrixBorder(name, "the router's weight", module.weight, *common)
            border.routes(module)
            yield border


def table_borders(
    chunk: Any, moment: Callable[[], Moment], claims: Claims, keeps_gradients: bool
) -> Iterator[MatrixBorder]:
    """Those of a chunk's embedding and output layer, as far as no scheme quantises the weight and a gradient comes.

    `chunk` is a Megatron-Core `GPTModel`, the rest as in `GradientBorder`. To a tied weight the other stage adds.
    """
    if chunk.share_embeddings_and_output_weights and not (chunk.pre_process and chunk.post_process):
        keeps_gradients = False
    common = moment, claims, keeps_gradients
    table = getattr(getattr(chunk, "embedding", None), "word_embeddings", None)
    output = getattr(chunk, "output_layer", None)
    by_weight: dict[Any, MatrixBorder] = {}
    left_out = set()
    for module, label in ((table, "the embedding"), (output, "the output layer's weight")):
        if module is None:
            continue
        weight = module.weight
        if weight is None:
            assert table is not None  # tied
            weight = table.weight
        spec = getattr(module, "precision", None)
        is_declared = spec is not None and (module is output or spec.is_quantised)
        # With the fusion no gradient comes: it is added to the main gradient inside of the product.
        if is_declared or getattr(module, "gradient_accumulation_fusion", False):
            left_out.add(weight)
        border = by_weight.setdefault(weight, MatrixBorder("model", label, weight, *common))
        (border.embeds if module is table else border.multiplies)(module)
    yield from (border for weight, border in by_weight.items() if weight not in left_out)
