"""Whether the main gradients that the optimizer gets are the sums of what the ranks' passes left, in some elements.

    main gradient = 1 / (data * context) sum_r gradient of rank r

over the ranks that have the same part of a parameter: those of all data- and context-parallel groups; the first and
the last stage, for a tied embedding; and tensor-parallel ranks that have a parameter whole and see tokens, or heads, of
their own. Other ranks that have it whole have the same gradient. An expert's is summed over all ranks that hold it.
Ranks that have the same part must also have read the same weights.

A rank's own gradient is seen before Megatron begins to reduce its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.model.layout import Layout, Place
from quantexp.model.shards import Shard, expert_of
from quantexp.model.sizes import distributes_optimizer, flops_per_iteration
from quantexp.proof.draws import Moment
from quantexp.proof.hooked import unseen_hook
from quantexp.proof.saved_state import drawn
from quantexp.proof.turns import THOROUGH, number_of_looks
from quantexp.schema import Experiment
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.state_shards import held_pieces
from quantexp.training.megatron.watched_sends import SendWatch

#: Short iterations (`number_of_looks`) of which one looks at a parameter.
_EVERY = 6
#: Of a sum of n float32 numbers, one by one, and their factor: n + 1 half units in the last place.
_UNIT = 2.0**-24
_TINY = 2.0**-126


@dataclass(frozen=True)
class _Seen:
    """What a rank has of a parameter before the reduction: its part, and drawn elements of it."""

    shard: Shard
    gradient: np.ndarray
    weights: np.ndarray


class SumWatch:
    """The reductions of a rank's gradients.

    Args:
        experiment: the run's.
        models: the wrapped chunks.
        parts: this rank's parts of the parameters.
        optimizer: Megatron's, of which a distributed one gets the sums of its range of a part alone.
        chunks: this rank's chunks, of which a pipeline's send something.
    """

    def __init__(
        self,
        experiment: Experiment,
        models: Sequence[DistributedDataParallel],
        parts: Mapping[str, Part],
        optimizer: Any,
        chunks: Sequence[GPTModel],
    ) -> None:
        self._seed, self._parts = experiment.training.seed, parts
        self._layout, self._model = Layout.of(experiment), experiment.model
        self._own = self._layout.place(torch.distributed.get_rank())
        #: The elements of which this rank gets the sum, by parameter.
        self._ranges = {name: (0, part.tensor.numel()) for name, part in parts.items()}
        if distributes_optimizer(experiment):
            held = held_pieces(optimizer, parts)
            self._ranges = {
                name: (each.piece.start, each.piece.stop) for name, each in held.items()
            }
        training = experiment.training
        length, size = training.seq_length, training.global_batch_size
        flops = flops_per_iteration(experiment.model, length, size)
        self._is_short = not number_of_looks(flops / self._layout.num_processes)
        self.sends = SendWatch(chunks, self._layout)
        #: Iterations that still look at a parameter each.
        self._thorough = 0
        #: Whether the running iteration compares, and by parameter which elements.
        self._is_due = False
        self._due: dict[str, np.ndarray] = {}
        self._before: dict[str, _Seen] = {}
        #: What the optimizer must get.
        self._after: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        #: The sums of the gradients that the passes have computed, in float32 as Megatron adds them, and the hooks.
        self._passed: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        #: What is wrong in the running iteration.
        self.found: list[str] = []
        names = {id(part.tensor): name for name, part in parts.items()}
        self._names: list[str] = []
        #: The parameters of all ranks.
        self._all: list[str] = []
        for model in models:
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                own = [names[id(p)] for bucket in group.buckets for p in bucket.params_list]
                self._names += own
                group.start_grad_sync = partial(self._take, own, group.start_grad_sync)
        self._all = sorted({name for of_rank in gather(self._names) for name in of_rank})

    def begin(self, iteration: int, is_complete: bool | None) -> None:
        """An iteration begins that is proved completely, in drawn parts or (None) not at all."""
        self._is_due, self._due, self._before, self._passed, self.found = False, {}, {}, {}, []
        self._after = {}
        if is_complete is None or not (self._all or self._layout.pipeline > 1):
            return
        self._thorough = THOROUGH if is_complete else self._thorough - 1
        chosen = Moment(self._seed, iteration).choice("sums")
        if self._is_short and self._thorough < 0 and chosen.randrange(_EVERY):
            return
        self._is_due = True
        self.sends.begin(chosen.random())
        for name in self._all if is_complete or not self._all else [chosen.choice(self._all)]:
            first = chosen.random()
            if name in self._names:
                tensor: Any = self._parts[name].tensor
                self._due[name] = drawn(tensor.numel(), first)
                self._handles.append(tensor.register_hook(unseen_hook(partial(self._add, name))))

    def finalize(self, finalize: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Megatron's `finalize_model_grads`, whose sums are then compared; every rank calls this."""
        finalize(*args, **kwargs)
        while self._handles:
            self._handles.pop().remove()
        if not self._is_due:
            return
        self._is_due = False
        before, sends = zip(*gather((self._before, self.sends.taken())), strict=True)
        ranks = [(self._layout.place(n), seen) for n, seen in enumerate(before)]
        self.found += self.sends.wrong(sends)
        for name, at in self._due.items():
            own = self._before.get(name)
            if own is None:
                self.found.append(f"{name}: its gradient was not added up over the ranks")
                continue
            same = [
                (place, e)
                for place, seen in ranks
                if (e := seen.get(name)) and e.shard == own.shard
            ]
            if any(not np.array_equal(e.weights, own.weights, equal_nan=True) for _, e in same):
                self.found.append(f"{name}: ranks have read other weights than each other")
            counted = [e.gradient for place, e in same if self._adds(name, place)]
            start, stop = self._ranges.get(name, (0, 0))
            inside = (start <= at) & (at < stop)
            now = self._values(name, "main_grad", at[inside])
            self._after[name] = at[inside], now
            if wrong := self._num_wrong(now, np.stack(counted)[:, inside]):
                words = "drawn elements of the main gradient are not the sum of the ranks' own"
                self.found.append(f"{name}: {wrong} of {len(now)} {words}")

    def look(self) -> list[str]:
        """What is wrong with the gradients that the optimizer gets now."""
        for name, (at, after) in self._after.items():
            if not np.array_equal(self._values(name, "main_grad", at), after, equal_nan=True):
                self.found.append(f"{name}: its main gradient has changed after the passes")
        return self.found

    def _adds(self, name: str, place: Place) -> bool:
        """Whether the gradient of another rank with the same part, or this rank's own, is a term of this rank's sum."""
        if place.tensor == self._own.tensor or expert_of(name) is not None:
            return True
        of_heads = self._model.qk_norm and "_layernorm" in name.partition("self_attention.")[2]
        return self._layout.sequence or of_heads

    @np.errstate(invalid="ignore", over="ignore")  # of gradients that overflow
    def _num_wrong(self, now: np.ndarray, terms: np.ndarray) -> int:
        """How many elements are not the mean of the ranks' terms, [ranks, elements]; none where that is not finite."""
        factor = 1 / (self._layout.data * self._layout.context)
        expected, magnitude = factor * terms.sum(0), factor * abs(terms).sum(0)
        slack = (len(terms) + 1) * _UNIT * magnitude + len(terms) * _TINY
        return int((np.isfinite(expected) & ~(abs(now - expected) <= slack)).sum())

    def _add(self, name: str, gradient: Tensor) -> None:
        """A pass has computed a gradient, which is added to the main gradient."""
        own = gradient.view(-1)[torch.from_numpy(self._due[name]).to(gradient.device)].float()
        before = self._passed.get(name)
        self._passed[name] = own if before is None else before + own

    def _take(
        self, names: Sequence[str], start: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """See some gradients before `start` begins their reduction."""
        for name in names:
            if name in self._due and name not in self._before:
                at = self._due[name]
                values = (self._values(name, kind, at) for kind in ("main_grad", "data"))
                seen = self._before[name] = _Seen(self._parts[name].shard, *values)
                passed = self._passed.get(name)
                if passed is not None and not np.array_equal(
                    passed.double().cpu().numpy(), seen.gradient, equal_nan=True
                ):
                    words = "the main gradient is not the sum of the gradients of its passes"
                    self.found.append(f"{name}: {words}")
        return start(*args, **kwargs)

    def _values(self, name: str, kind: str, at: np.ndarray) -> np.ndarray:
        whole: Tensor = getattr(self._parts[name].tensor, kind)
        index = torch.from_numpy(at).to(whole.device)
        return whole.detach().view(-1)[index].double().cpu().numpy()
