"""A rank's parts of a model as the proof of engagement sees them: layers, routers, modules and their borders."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from quantexp.extra import Service, required
from quantexp.formats import Scaling
from quantexp.model.decoder import FINAL_NORM, OUTPUT, is_routed
from quantexp.model.layout import Layout
from quantexp.proof.attention_border import AttentionBorder
from quantexp.proof.border import COMPLETE, DRAWN, WITHOUT_CONTRASTS, Border, Extent, Findings
from quantexp.proof.call import Call
from quantexp.proof.declaration import Declaration
from quantexp.proof.drawn import DrawnChecks, DrawnWatch, LayerWatch
from quantexp.proof.draws import Moment
from quantexp.proof.histories import Histories
from quantexp.proof.hooked import Hooked
from quantexp.proof.initial_weights import difference
from quantexp.proof.linear_border import LinearBorder
from quantexp.proof.merging import merged
from quantexp.proof.model_border import pass_borders
from quantexp.proof.model_settings import other_settings
from quantexp.proof.norm_border import NormBorder, Note, note_failure
from quantexp.proof.objective import NOT_KNOWN
from quantexp.proof.places import Ranks
from quantexp.proof.rotary import Rotary
from quantexp.proof.turns import Turns
from quantexp.proof.verdict import Observed, SlotCalls, Verdict, beside_the_map, verdict
from quantexp.proof.watch import ProductWatch
from quantexp.quant.precision import ModuleId, ModulePrecision, PrecisionMap
from quantexp.quant.sites import Operand
from quantexp.quant.step_state import current_state
from quantexp.schema import Experiment, ModelConfig, QuantConfig, TrainingConfig
from quantexp.training.megatron.attention import SchemeAttention
from quantexp.training.megatron.collectives import gather, merge_amaxes
from quantexp.training.megatron.embedding import SchemeEmbedding
from quantexp.training.megatron.experts import moe_layers
from quantexp.training.megatron.linear import SchemeLinear
from quantexp.training.megatron.model import SchemeModule, linear_weights, scheme_modules
from quantexp.training.megatron.norm import SchemeRMSNorm
from quantexp.training.megatron.parameters import Part, parts_of
from quantexp.training.megatron.shares import is_emulated, ranks_of, sequence_shares, shares_of

#: Short iterations from one that sees what the map does not list to the next.
LAYER_EVERY = 24


class Watched:
    """The parts of a rank's chunks, by the names that messages have."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        seed: int,
        model: ModelConfig | None = None,
        quant: QuantConfig | None = None,
    ) -> None:
        """`seed` is the run's, as configured; so are `model` and `quant`, None if angles and maps are not compared."""
        self.chunks = chunks
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
        self.norms = {n: m for n, m in self.modules.items() if isinstance(m, SchemeRMSNorm)}
        #: Modules whose products Transformer Engine computes, which have its quantizers.
        named = self.modules.items()
        self.native: dict[ModuleId, Any] = {n: m for n, m in named if hasattr(m, "fp8_meta")}
        #: The layers' names.
        self.layers = [name for name in self.decoder if name not in map(str, self.modules)]
        self.histories = Histories()
        #: Whose turn it is in training, and in evaluations, under which map, and the borders of its modules.
        self._turns: dict[bool, tuple[PrecisionMap, Turns, dict[ModuleId, Border]]] = {}
        #: Whether any map so far had delayed scales, so that the ranks' amaxes are merged.
        self._merges = False
        #: The map of the last iteration that began.
        self._begun: PrecisionMap | None = None
        once = current_state().weights_once
        ranks = ranks_of(chunks[0].config) if chunks else Ranks()
        self._moment = Moment(seed, 1, weights_once=once, ranks=ranks)
        self.rotary = None if model is None else Rotary(model, *ranks.context)
        self.declaration = Declaration(quant, model.num_layers) if quant and model else None
        self.objective = NOT_KNOWN
        #: The model whose settings Megatron-Core's configuration must have; None if others are its own.
        self.configured: ModelConfig | None = None
        #: The parts that the seed fills, and what for, until they are compared; None if they come from elsewhere.
        self.initial: tuple[Mapping[str, Part], ModelConfig, TrainingConfig] | None = None

    def expect_drawn(self, experiment: Experiment, rank: int) -> None:
        """The run begins with the weights that its seed draws."""
        layout = Layout.of(experiment)
        parts = parts_of(self.chunks, experiment.model, layout, layout.place(rank))
        self.initial = parts, experiment.model, experiment.training

    def begin(self, iteration: int, index: int) -> None:
        """The forward or backward pass of this rank's micro-batch `index` begins."""
        size = parallel_state.get_data_parallel_world_size()
        number = index * size + parallel_state.get_data_parallel_rank()
        self._moment = replace(self._moment, iteration=iteration, micro_batch=number, index=index)

    def moment(self) -> Moment:
        """The iteration and micro-batch whose pass runs."""
        return self._moment

    @contextlib.contextmanager
    def proving(self, iteration: int, declared: PrecisionMap) -> Iterator[Callable[[], Verdict]]:
        """Watch the products inside; the function gives the verdict of all ranks, which all call it, afterwards."""
        self._moment = replace(self._moment, iteration=iteration)
        own = {name: declared[name] for name in self.modules}
        observed = Observed(own, {name: SlotCalls() for name in self.routers})
        borders = self.borders(own, observed, COMPLETE)
        observed.bordered = frozenset(borders)
        observed.others = [
            *self._other_than_drawn(),
            *(other_settings(self.chunks[0].config, self.configured) if self.configured else ()),
            *self._other_than_configured(declared, iteration),
            *self.histories.begin(self._merge(declared)),
        ]
        tables = {
            name: partial(self._lookup, module.weight.detach(), own[name])
            for name, module in self.modules.items()
            if isinstance(module, SchemeEmbedding)
        }
        layers = self._between(self.decoder, observed, declared, observed.note)
        seen = borders, self.decoder, self.routers, tables, layers, self.objective
        watch = ProductWatch(observed, *seen)
        native: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.native:
            native = required(Service.NATIVE_WATCH, "Transformer Engine")(watch, self.native)
        with watch.watching(), native:
            yield lambda: merged(declared, gather(verdict(iteration, observed)))

    def _between(
        self,
        decoder: Mapping[str, nn.Module],
        observed: Observed,
        declared: PrecisionMap,
        note: Note,
    ) -> list[Hooked]:
        """What compares the insides of some layers, and what surrounds them; `note` is for the norms of the map."""
        norms, report = self._norms(decoder, observed, declared, note), observed.others.append
        # Ranks that divide tokens or heads add up the gradients of norms.
        keeps_vectors = parallel_state.get_tensor_model_parallel_world_size() == 1
        keeps_vectors &= _keeps_gradients()
        own = decoder, self.chunks, self.moment, report, self.rotary, norms
        return pass_borders(*own, keeps_vectors=keeps_vectors, objective=self.objective)

    def _norms(
        self, layers: Container[str], observed: Observed, declared: PrecisionMap, note: Note
    ) -> dict[nn.Module, NormBorder]:
        """The norms of the map in some layers, and the last one."""
        return {
            module: NormBorder(
                module, declared[name], self.moment, _largest, note, observed.explain
            )
            for name, module in self.norms.items()
            if name.name == FINAL_NORM or f"layer {name.layer}" in layers
        }

    def _other_than_configured(
        self, declared: PrecisionMap, iteration: int, *, quantised: bool = True
    ) -> list[str]:
        own = self.declaration
        return [] if own is None else own.differences(declared, iteration, quantised=quantised)

    def _other_than_drawn(self) -> list[str]:
        """What is wrong with the weights that the run begins with, once."""
        if self.initial is None:
            return []
        (parts, model, training), self.initial = self.initial, None
        wrong = {
            name: difference(part.parameter, part.shard, part.tensor, model, training)
            for name, part in parts.items()
        }
        return [f"{name}: {words}" for name, words in wrong.items() if words]

    def _merge(
        self, declared: PrecisionMap
    ) -> Callable[[Mapping[str, float]], Mapping[str, float]]:
        """Merges the amaxes that the ranks saw before this map was in force; without delayed scales there are none."""
        merges = self._merges
        if declared is not self._begun:
            specs = (spec for module in declared.values() for spec in module.slots.values())
            self._merges = merges or any(spec.scaling is Scaling.DELAYED for spec in specs)
            self._begun = declared
        return (lambda seen: merge_amaxes(dict(seen))) if merges else dict

    def _lookup(self, weight: Tensor, declared: ModulePrecision) -> Call:
        call = Call(declared, self.moment(), _largest, self.histories)
        call.see(Operand.W, weight)
        return call

    def drawing(
        self,
        iteration: int,
        declared: PrecisionMap,
        checks: DrawnChecks,
        looks: int,
        num_micro_batches: int,
        turn: int | None = None,
        *,
        quantised: bool = True,
    ) -> contextlib.AbstractContextManager[None]:
        """Checks some lines of the products whose turn it is in an iteration, or in the evaluation after it.

        `looks` is that of `number_of_looks`; with 0 micro-batches, each pass is looked at. The turn is that of the
        iteration unless `turn` says otherwise. The map must be the scheme's, or quantise nothing.
        """
        self._moment = replace(self._moment, iteration=iteration)
        turn = iteration if turn is None else turn
        known = self._turns.get(bool(num_micro_batches))
        if known is None or known[0] is not declared:
            own = {
                name: declared[name]
                for name, module in self.modules.items()
                if not hasattr(module, "fp8_meta") or is_emulated(module)
            }
            turns = Turns(own, self._moment.seed, looks, num_micro_batches)
            known = declared, turns, self.borders(own, checks, DRAWN)
            self._turns[bool(num_micro_batches)] = known
        _, turns, all_borders = known
        extent = DRAWN if turns.has_contrasts(turn) else WITHOUT_CONTRASTS
        is_in_forward, units = turns.are_in_forward(turn), turns.of(turn)
        borders = {name: all_borders[name] for name in units if name in all_borders}
        for name, border in borders.items():
            border.look(checks, extent, units[name], is_in_forward=is_in_forward)
        wrong = self._other_than_configured(declared, iteration, quantised=quantised)
        if not num_micro_batches:
            self.histories.begin_evaluation()
        else:
            wrong += self.histories.begin(self._merge(declared))
        for words in wrong:
            checks.failures.setdefault(words, words)
        watch = DrawnWatch(checks, borders)
        every = LAYER_EVERY if turns.are_short and not turns.is_thorough(turn) else 1
        is_due = turns.whose("layer", turn, every) == 0
        if not self.layers or self.native or not (is_due or self.norms):
            return watch
        label, each = ("due", turn // every) if is_due else ("norms", turn)
        layer = self.layers[turns.whose(label, each, len(self.layers))]
        return self._drawing_layer(layer, watch, declared, is_due=is_due)

    @contextlib.contextmanager
    def _drawing_layer(
        self, name: str, watch: DrawnWatch, declared: PrecisionMap, *, is_due: bool
    ) -> Iterator[None]:
        """Besides, see the products of one layer that the map does not list; in short iterations only in some.

        In each iteration the norms of one layer are compared, if the map has them.
        Not beside Transformer Engine, whose own products have no context where nothing stands in its way.
        """
        routers = {n: m for n, m in self.routers.items() if is_due and n.startswith(f"{name} ")}
        observed = Observed({}, {each: SlotCalls() for each in routers})
        decoder = {name: self.decoder[name]}
        note = partial(note_failure, observed, self.moment)
        with watch, contextlib.ExitStack() as stack:
            if is_due:
                layers = self._between(decoder, observed, declared, note)
                own = decoder[name], routers, layers, self.objective
                of_layer = LayerWatch(observed, name, *own)
                stack.enter_context(of_layer.watching())
            else:
                for norm in self._norms(decoder, observed, declared, note).values():
                    stack.enter_context(norm)
            yield
        for words in beside_the_map(observed) + observed.others:
            watch.checks.failures.setdefault(words, words)

    def borders(
        self, declared: PrecisionMap, findings: Findings, extent: Extent
    ) -> dict[ModuleId, Border]:
        """The borders of the modules of a map; Transformer Engine's layers and embeddings have none."""
        keeps_gradients = _keeps_gradients()
        borders: dict[ModuleId, Border] = {}
        for name, precision in declared.items():
            module: Any = self.modules[name]
            common = module, precision, findings, self.moment, _largest, self.histories, extent
            if isinstance(module, SchemeAttention):
                borders[name] = AttentionBorder(
                    *common,
                    softmax_scale=_softmax_scale(module),
                    shares=sequence_shares(),
                    uses_kernels=module.uses_kernels,
                )
            elif isinstance(module, SchemeLinear) or is_emulated(module):
                borders[name] = LinearBorder(
                    *common,
                    weight=self.weights[name],
                    shares=shares_of(module),
                    keeps_gradients=keeps_gradients,
                )
        return borders


def _keeps_gradients() -> bool:
    """Whether nothing but this rank's micro-batches is added to its main gradients."""
    size: int = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    return size == 1


def _softmax_scale(module: Any) -> float:
    """The factor of the scores, from the configuration alone.

    That of latent attention has the magnitude scale of YaRN, as in Megatron-Core (`_yarn_get_mscale`).
    """
    config = module.config
    if not getattr(config, "multi_latent_attention", False):
        return 1.0 / math.sqrt(config.kv_channels)
    factor, scale = config.rotary_scaling_factor, config.mscale_all_dim
    magnitude = 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return magnitude**2 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)


def _largest(module: ModuleId, amax: Tensor) -> Tensor:
    """The maximum of an amax over the ranks that hold parts of a module's tensors."""
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if is_routed(module.name)
        else parallel_state.get_tensor_and_context_parallel_group()
    )
    if group.size() == 1:
        return amax
    whole = amax.detach().clone()
    torch.distributed.all_reduce(whole, op=torch.distributed.ReduceOp.MAX, group=group)
    return whole
