"""What lies outside of a model's layers, compared in float64 in some tokens of each pass.

    x_t = row of the table            y -> n = norm(y) -> logits l = n W^T
    loss_t = log sum_v exp(l_v) - l_label            dl = (softmax(l) - 1_label) dloss_t

Ranks that divide the vocabulary have the logits of their part; a sum of exponentials and the label's logit are
gathered. A rank compares the tokens of its part of the table. What a scheme looks up, or multiplies in the output
layer, is compared as a product elsewhere.

    # T tokens, B sequences, R drawn tokens, V vocabulary of a rank, H width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.proof.between import Norm
from quantexp.proof.draws import Moment, lines
from quantexp.proof.expert_border import ExpertBorder
from quantexp.proof.hooked import Hooked, plain, unseen_hook
from quantexp.proof.layer_border import LayerBorder, LayerEntry
from quantexp.proof.layer_pass import Claims, Pass, PassBorder
from quantexp.proof.matrix_border import router_borders, table_borders
from quantexp.proof.norm_border import NormBorder
from quantexp.proof.objective import NOT_KNOWN, Objective
from quantexp.proof.products import Reference, largest_finite, reference
from quantexp.proof.rotary import Rotary
from quantexp.proof.vector_border import vector_borders

#: Columns of the logits that are compared with the product.
_COLUMNS = 64
#: Logits of the tokens whose loss is compared, at least those of one; a whole vocabulary each.
_LOGITS = 1 << 18
#: Below this float32's exponential may be zero.
_LOST = 2.0**-120


class ModelBorder(PassBorder):
    """What is before a rank's first layer and after its last one, in one chunk of a model, while it is watched."""

    def __init__(
        self,
        chunk: Any,
        moment: Callable[[], Moment],
        claims: Claims,
        first: LayerBorder | None,
        norms: Mapping[nn.Module, NormBorder],
        objective: Objective = NOT_KNOWN,
    ) -> None:
        """`chunk` is a Megatron-Core `GPTModel`; `first` its first layer, if that is watched; `norms` as in a layer.

        `objective`: what its passes learn.
        """
        super().__init__("model", moment, claims)
        self._objective = objective
        self._norms = norms
        self._lacks_norm, self._num_evaluated = False, 0
        self._chunk, self._config, self._first = chunk, chunk.config, first
        self._tokens: Tensor | None = None
        self._labels: Tensor | None = None

    def _forget(self) -> None:
        super()._forget()
        self._tokens = self._labels = None
        #: The passes of the running evaluation.
        self._num_evaluated = 0

    def _install(self) -> None:
        chunk = self._chunk
        see = plain(self._enter)
        self._hook(chunk.register_forward_pre_hook(see, with_kwargs=True, prepend=True))
        if getattr(chunk, "pre_process", False):
            self._on_output(chunk.embedding, self._embed)
        norm = getattr(chunk.decoder, "final_layernorm", None)
        if isinstance(norm, nn.RMSNorm):
            self._on_output(norm, partial(self._norm, norm))
        if getattr(chunk, "post_process", False):
            is_rms = self._config.normalization == "RMSNorm"
            is_known = isinstance(norm, nn.RMSNorm) or _is_of_te(norm)
            self._lacks_norm = is_rms and not is_known
            self._on_input(chunk.output_layer, self._project)
            self._on_output(chunk.output_layer, self._multiply)
        self._on_output(chunk, self._leave)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Packed sequences, several tokens predicted at once, and scaled embeddings and logits are not compared."""
        tokens = args[0] if args else kwargs.get("input_ids")
        self._tokens, self._labels = tokens, kwargs.get("labels")
        others = [getattr(self._config, each, None) for each in ("mtp_num_layers", "use_mup")]
        others.append(kwargs.get("packed_seq_params"))
        known = [x for x in (self._tokens, self._labels) if x is not None]
        self._now = None
        if known and not any(others):
            self._now = Pass(self._moment(), None, known[0].shape[0])
            if len(known) == 2:
                mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
                self._compare_tokens(known[0], known[1], mask)

    def _compare_tokens(self, tokens: Tensor, labels: Tensor, mask: Tensor | None) -> None:
        if wrong := self._objective.num_unlike(tokens, labels):
            self._tell_of_tokens(wrong, "labels are not the next token")
        index = -1
        if not torch.is_grad_enabled():
            index, self._num_evaluated = self._num_evaluated, self._num_evaluated + 1
        now = self._pass
        wrong, counts = self._objective.compared(tokens, labels, mask, now.moment, index)
        if wrong:
            words = "tokens and labels are not those of the samples that are due"
            self._tell_of_tokens(wrong, words)
        if counts is not None:
            now.seen["counts"] = counts

    def _embed(self, output: Tensor, _: Any) -> None:
        """Sums over the ranks turn a zero's sign."""
        if self._config.hidden_dropout and self._chunk.training:
            return
        self._pass_on(self._first, output)
        module, tokens = self._chunk.embedding.word_embeddings, self._tokens
        spec = getattr(module, "precision", None)
        is_plain = spec is None or not spec.is_quantised
        if tokens is None or getattr(self._chunk.embedding, "add_position_embedding", False):
            return
        T, B = output.shape[:2]
        picked = self._pass.picked(T * B).to(tokens.device)
        start = module.tp_group.rank() * T if tokens.shape[1] != T else 0
        rows = tokens[picked % B, picked // B + start] - module.vocab_start_index
        inside = (rows >= 0) & (rows < len(module.weight))
        if is_plain:
            own, expected = self._drawn(output)[inside], module.weight.detach()[rows[inside]]
            words = "that left the embedding are not the rows of their tokens"
            self._tell(own + 0.0, expected.to(own.dtype) + 0.0, words)

    def _norm(self, module: nn.RMSNorm, output: Tensor, args: tuple[Tensor]) -> None:
        self._arrive("the last norm", args[0])
        x, own = self._drawn(args[0]), self._drawn(output)
        border = self._norms.get(module)
        gain = module.weight.detach() if border is None else border.gain()
        norm = Norm(x, gain, self._config.layernorm_epsilon)
        if border is None or not border.rounds_result:
            words = "that left the last norm are not the norm of what entered it"
            self._tell(own, norm.forward(), words)
        self._seen["norm"] = own
        self._on_gradient(output, "norm")
        self._on_gradient(args[0], "x", partial(self._norm_gradient, norm))

    def _norm_gradient(self, norm: Norm, own: Tensor) -> None:
        if "d norm" in self._seen:
            words = "of the gradient of what entered the last norm are not the norm's"
            self._tell(own, norm.back(self._seen["d norm"]), words)

    def _project(self, x: Tensor, *_: Any) -> None:
        if self._lacks_norm:
            words = "the last norm is no RMSNorm"
            self._claims.tell(self._name, words, self._pass.moment.micro_batch)
        self._same("the output layer", "norm", "left the last norm", x)

    def _multiply(self, output: Any, args: tuple[Any, ...]) -> None:
        """An output layer of the map is compared as such; one that gathers its tokens has others than its input."""
        module, logits = self._chunk.output_layer, output[0]
        own = self._drawn(logits)
        self._seen["logits"] = own[: max(1, _LOGITS // own.shape[-1])]
        self._on_gradient(logits, "logits", self._logits_gradient)
        if hasattr(module, "precision") or args[0].shape[0] != logits.shape[0]:
            return
        weight = module.weight
        if weight is None:
            weight = self._chunk.embedding.word_embeddings.weight
        picked = lines(self._pass.moment.choice("logits"), len(weight), 1, _COLUMNS)
        expected = reference(self._drawn(args[0]), weight.detach()[picked].t())
        words = "of the logits are not the product of what entered the output layer and its weight"
        self._tell(own[:, picked], expected, words)

    def _leave(self, output: Any, _: Any) -> None:
        now = self._pass
        if self._labels is not None and "logits" in now.seen and not self._is_fused:
            logits = now.seen["logits"].double()
            labels = now.drawn(self._labels.t()[..., None])[: len(logits)]
            place = labels - self._group.rank() * logits.shape[-1]
            inside = (place >= 0) & (place < logits.shape[-1])
            place = place.clamp(0, logits.shape[-1] - 1)
            of_label = logits.gather(-1, place).masked_fill(~inside, -math.inf)
            total, of_label = self._of_vocabulary(logits.logsumexp(-1, keepdim=True), of_label)
            now.seen |= {"total": total, "place": place, "inside": inside}
            vocabulary = logits.shape[-1] * self._group.size()
            values = total - of_label
            # log sum exp(l - max) is at most log V, the label's part at most the loss; the sum's error is a part of it.
            magnitude = 2 * values.abs() + 2 * math.log(vocabulary) + 2
            summed = torch.full_like(values, math.sqrt(vocabulary))
            words = "of the loss are not the cross entropy of the logits"
            expected = Reference(values, magnitude, summed, 0.0, 2)
            self._tell(now.drawn(output.t()[..., None])[: len(logits)], expected, words)
            if output.requires_grad:
                losses = output.detach()
                output.register_hook(unseen_hook(partial(self._see_loss_gradient, now, losses)))
            elif "counts" in now.seen:
                self._objective.see_evaluated(output, now.seen["counts"])
        self._now = None

    def _see_loss_gradient(self, now: Pass, losses: Tensor, g: Tensor) -> None:
        self._objective.see(losses, g)
        now.seen["d loss"] = now.drawn(g.t()[..., None])
        counts = now.seen.get("counts")
        wrong = self._objective.num_wrong(g)
        if counts is not None and self._objective.is_masked:
            wrong += int(((g != 0) != counts).sum())
        if wrong:
            self._now = now
            self._tell_of_tokens(wrong, "tokens do not have their part in the mean of the losses")
            self._now = None

    def _tell_of_tokens(self, number: int, words: str) -> None:
        self._claims.tell(self._name, words, self._pass.moment.micro_batch, f"{number} ")

    def _logits_gradient(self, own: Tensor) -> None:
        if not {"d loss", "total"} <= self._seen.keys():
            return
        seen = self._seen
        distance = seen["logits"].double() - seen["total"]
        one = torch.zeros_like(distance).scatter_(-1, seen["place"], seen["inside"].double())
        p, g = distance.exp(), seen["d loss"][: len(distance)].double()
        summed = p * (distance.abs() + math.sqrt(p.shape[-1] * self._group.size())) * g.abs()
        lost = _LOST * (1 + largest_finite(g))
        expected = Reference((p - one) * g, (p + one) * g.abs(), summed, lost, 4)
        words = "of the gradient of the logits are not the loss's"
        self._tell(own[: len(distance)], expected, words)

    @property
    def _is_fused(self) -> bool:
        return bool(getattr(self._config, "cross_entropy_loss_fusion", False))

    @property
    def _group(self) -> Any:
        """The ranks that divide the vocabulary."""
        return self._chunk.output_layer.tp_group

    def _of_vocabulary(self, total: Tensor, of_label: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of exponentials, as a logarithm, and the label's logit, over all ranks."""
        if self._group.size() == 1:
            return total, of_label
        own = torch.cat([total, of_label], dim=-1)
        parts = [torch.empty_like(own) for _ in range(self._group.size())]
        torch.distributed.all_gather(parts, own, group=self._group)
        whole = torch.stack(parts)
        return whole[..., :1].logsumexp(0), whole[..., 1:].amax(0)


def _is_of_te(module: object) -> bool:
    return type(module).__module__.startswith("transformer_engine")


def pass_borders(
    decoder: Mapping[str, nn.Module],
    chunks: Sequence[Any],
    moment: Callable[[], Moment],
    report: Callable[[str], None],
    rotary: Rotary | None = None,
    norms: Mapping[nn.Module, NormBorder] | None = None,
    *,
    keeps_vectors: bool = False,
    objective: Objective = NOT_KNOWN,
) -> list[Hooked]:
    """Those of the decoder's layers, by their names `layer N`, of their experts, and of what surrounds the layers.

    The latter is watched with any layer of its chunk. `norms` are those of the map; `keeps_vectors`: nothing but
    this rank's micro-batches is added to the main gradients of vectors. `objective` as in `ModelBorder`.
    """
    norms, claims = norms or {}, Claims(report)
    layers = {
        name: LayerBorder(name, module, moment, claims, rotary, norms)
        for name, module in decoder.items()
        if hasattr(module, "self_attention")
    }
    modules = {f"layer {m.layer_number - 1}": m for chunk in chunks for m in chunk.decoder.layers}
    entries: list[Hooked] = []
    for name, border in layers.items():
        after = f"layer {int(name.split()[1]) + 1}"
        border.following = layers.get(after)
        if border.following is None and after in modules:
            border.following = LayerEntry(after, modules[after], moment, claims)
            entries.append(border.following)
    borders: list[Hooked] = [
        ExpertBorder(f"{name} experts", module.mlp, moment, report)
        for name, module in decoder.items()
        if ExpertBorder.can_watch(getattr(module, "mlp", None))
    ]
    seen = moment, claims, keeps_vectors
    for name in layers:
        borders += vector_borders(name, modules[name], *seen)
        borders += router_borders(name, modules[name], *seen)
    for chunk in chunks:
        names = [f"layer {layer.layer_number - 1}" for layer in chunk.decoder.layers]
        if not layers.keys().isdisjoint(names):
            around = ModelBorder(chunk, moment, claims, layers.get(names[0]), norms, objective)
            if getattr(chunk, "post_process", False) and names[-1] in layers:
                layers[names[-1]].following = around
            borders += [around, *table_borders(chunk, *seen)]
            if (last := getattr(chunk.decoder, "final_layernorm", None)) is not None:
                borders += vector_borders("model", last, *seen)
    return [*layers.values(), *entries, *borders, *norms.values()]
