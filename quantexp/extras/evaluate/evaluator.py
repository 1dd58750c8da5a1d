"""Forward passes over held-out samples under a scheme and in bf16, without optimizer and gradients, in any layout.

Each group of micro-batches runs once with nothing quantised, the reference, and then under each map: the scheme's, and,
if asked for, the scheme in one layer or module at a time. In the first group the proof of engagement watches every
pass completely, in the others drawn parts of each. Weights are quantised for each product anew, so that memory holds no
second copy of the model.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module

from quantexp.config.evaluation import Part, map_iteration, parts_evaluated
from quantexp.extras.evaluate.token_measures import DocumentSums, TokenMeasure, token_measures
from quantexp.model.layout import Layout
from quantexp.model.training_state import read_index
from quantexp.proof.declaration import Declaration
from quantexp.proof.drawn import DrawnChecks
from quantexp.proof.merging import named_in_order
from quantexp.proof.verdict import Verdict, require, require_none
from quantexp.quant.precision import (
    ModuleId,
    PrecisionMap,
    forward_only,
    precision_map,
    unquantised,
)
from quantexp.quant.step_state import StepState
from quantexp.schema import Experiment, Precision
from quantexp.training.megatron.collectives import (
    any_rank,
    gather,
    mean_over_data_parallel,
    sum_over_stages,
)
from quantexp.training.megatron.experts import forget_balancing_loss
from quantexp.training.megatron.initial_weights import load_initial_weights
from quantexp.training.megatron.model import (
    build_chunks,
    scheme_modules,
    scheme_spec,
    set_precision,
)
from quantexp.training.megatron.numerics_state import has_delayed_scales
from quantexp.training.megatron.passes import Batch, Passes
from quantexp.training.megatron.watched import Watched


@dataclass(frozen=True)
class Group:
    """The result of one group of micro-batches under the scheme, over all ranks."""

    loss: float
    tokens: int
    seconds: float
    #: Of the scheme, in the first group.
    verdict: Verdict | None


class Evaluator:
    """The model of a rank, and the sums of its tokens by document."""

    def __init__(self, experiment: Experiment, device: torch.device, state: StepState) -> None:
        model, training = experiment.model, experiment.training
        self.layout, self.training = Layout.of(experiment), training
        self.device, self.state, self.iteration = device, state, map_iteration(experiment)
        forget_balancing_loss()
        self.chunks, config = build_chunks(
            model,
            training,
            scheme_spec(model, experiment.quant.backend),
            self.layout,
            experiment.parallel.dispatcher,
            experiment.quant,
        )
        start = load_initial_weights(self.chunks, experiment)
        state.updates_histories = False
        if start is not None and start.state.is_file() and has_delayed_scales(experiment):
            state.load_state_dict(read_index(start.state).amax_histories, device)
        models: list[Any] = [chunk.to(device) for chunk in self.chunks]
        if training.precision is not Precision.fp32:
            models = [Float16Module(config, each) for each in models]
        for each in models:
            each.eval()
        self.passes = Passes(models, training, self.layout, device)
        self.watched = Watched(self.chunks, training.seed, model)
        declared = precision_map(model, experiment.quant, self.iteration)
        declaration = Declaration(experiment.quant, model.num_layers)
        require_none(declaration.differences(declared, self.iteration), self.iteration)
        self.reference = unquantised(declared)
        self.parts = parts_evaluated(experiment, declared)
        self.maps = [self._map(declared, part) for part in self.parts]
        self.sums = DocumentSums(len(self.maps))
        #: The forward products of each map, by its identity.
        self._forward: dict[int, PrecisionMap] = {}

    def _map(self, declared: PrecisionMap, part: Part) -> PrecisionMap:
        """The scheme in this part, and nothing quantised elsewhere."""

        def is_chosen(name: ModuleId) -> bool:
            return part.layer in (None, name.layer) and part.module in (None, name.name)

        return {
            name: module if is_chosen(name) else self.reference[name]
            for name, module in declared.items()
        }

    def groups(self, held_out: Iterable[Batch]) -> Iterator[Group]:
        """Evaluate; every rank iterates.

        Raises:
            EngagementError: a pass did not quantise exactly what its map declares.
        """
        batches = iter(held_out)
        for index in itertools.count():
            group = list(itertools.islice(batches, self.layout.pipeline))
            if not group:
                return
            yield self._group(index, group)

    @torch.no_grad()
    def _group(self, index: int, group: list[Batch]) -> Group:
        begin = time.perf_counter()
        reference = self._logits(index, group, self.reference)[0]
        own = torch.zeros(2, dtype=torch.float64, device=self.device)
        verdict = None
        for number, declared in enumerate(self.maps):
            results, proof = self._logits(index, group, declared)
            verdict = verdict or proof
            for (batch, logits), (_, in_reference) in zip(results, reference, strict=True):
                measures = token_measures(in_reference, logits, batch["labels"])
                mask = batch["loss_mask"]
                if number == 0:
                    sums = (measures[TokenMeasure.LOSS] * mask).sum()
                    own += torch.stack([sums, mask.sum().to(torch.float64)])
                if parallel_state.get_tensor_model_parallel_rank() == 0:
                    self.sums.add(number, measures, mask, batch["documents"])
        total, mean_count = mean_over_data_parallel(sum_over_stages(own)).tolist()
        tokens = round(mean_count * self.layout.data)
        loss = total / mean_count if mean_count else 0.0
        return Group(loss, tokens, time.perf_counter() - begin, verdict)

    @torch.no_grad()
    def logits_of(self, index: int, tokens: Sequence[int], declared: PrecisionMap) -> torch.Tensor:
        """The logits of one sequence in one process, [T, V] in the working dtype; pass 0 is proved.

        Raises:
            EngagementError: pass 0 did not quantise exactly what the map declares.
        """
        tokens_BT = torch.tensor([list(tokens)])
        batch = {
            "tokens": tokens_BT,
            "labels": tokens_BT,
            "loss_mask": torch.ones(tokens_BT.shape),
            "position_ids": torch.arange(tokens_BT.shape[1]).unsqueeze(0),
        }
        ((_, logits_BTV),), _ = self._logits(index, [batch], declared)
        return logits_BTV[0]

    def _logits(
        self, index: int, group: list[Batch], declared: PrecisionMap
    ) -> tuple[list[tuple[Batch, torch.Tensor]], Verdict | None]:
        """The logits of a group under a map, and the proof of the first group."""
        for chunk in self.chunks:
            own = {name: declared[name] for name in scheme_modules(chunk)}
            set_precision(chunk, own, self.training.attention)

        def begin(position: int) -> None:
            place = index * self.layout.pipeline + position
            self.watched.begin(self.iteration, place)
            rank = parallel_state.get_data_parallel_rank()
            self.state.begin(self.iteration, place * self.layout.data + rank)

        forward = self._forward.setdefault(id(declared), forward_only(declared))
        if index > 0:
            checks = DrawnChecks()
            with self.watched.drawing(self.iteration, forward, checks, 1, 0, turn=index):
                logits = self.passes.logits(group, begin)
            if any_rank(bool(checks.failures)):
                failures = named_in_order(gather(checks.in_order()))
                require_none(failures, self.iteration, f"in group {index} of the evaluation of")
            return logits, None
        with self.watched.proving(self.iteration, forward) as verdict:
            logits = self.passes.logits(group, begin)
        result = verdict()
        require(result)
        return logits, result

    def table(self) -> tuple[list[int], torch.Tensor]:
        """The sums of all ranks: `DocumentSums.table`; every rank calls this."""
        merged = DocumentSums(len(self.maps))
        for sums in gather(self.sums.sums):
            merged.include(sums)
        return merged.table()
