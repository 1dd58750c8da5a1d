"""How the rows of a mixture of experts are sent and added, in the drawn tokens of each pass of all ranks.

    y_t = sum_e p_te f_e(x_t) + shared(x_t)        p_te inside of the expert e

A row that reaches an expert is known by its content: that of a drawn token, bit for bit. Each chosen expert must have
it, with the weight that the router gave; y must be the sum of what the experts return for it, rounded after each step.
The sequence and the micro-batch that the expert takes it to be of (`rows`) must be those of the token. No table of the
dispatcher is used. If a row has the content of two tokens nothing is said of its sum.

# R drawn tokens of one rank, M ranks that share the experts, N = M R, E experts, S rows of this rank's experts, H width
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantexp.formats.torch_internals import unseen
from quantexp.proof.between import total
from quantexp.proof.bits import as_integers
from quantexp.proof.draws import Moment
from quantexp.proof.hooked import Hooked, plain
from quantexp.proof.layer_pass import Pass
from quantexp.proof.products import Reference, num_wrong
from quantexp.quant.rows import Rows

#: Elements of a row that are compared first.
_FIRST = 4


@dataclass
class _Drawn:
    """What was seen of one pass of the layer."""

    own: Pass
    #: Tokens and sequences of this rank.
    shape: tuple[int, int]
    parts: dict[str, Tensor] = field(default_factory=dict)


class ExpertBorder(Hooked):
    """One layer of experts while it is watched; all ranks that share its experts watch it together."""

    def __init__(
        self,
        name: str,
        layer: Any,
        moment: Callable[[], Moment],
        report: Callable[[str], None],
    ) -> None:
        """`layer` is a Megatron-Core `MoELayer` for which `can_watch` holds."""
        super().__init__()
        self._name, self._layer, self._moment, self._report = name, layer, moment, report
        self._now: _Drawn | None = None

    @staticmethod
    def can_watch(layer: Any) -> bool:
        """Whether experts get rows as they are, one by one, and what they return is added."""
        config = getattr(layer, "config", None)
        others = (
            *("moe_apply_probs_on_input", "moe_latent_size", "moe_shared_expert_overlap"),
            *("moe_expert_capacity_factor", "add_bias_linear"),
        )
        return (
            hasattr(getattr(layer, "experts", None), "local_experts")
            and getattr(config, "moe_token_dispatcher_type", "") in ("alltoall", "allgather")
            and not any(getattr(config, each, None) for each in others)
        )

    def _forget(self) -> None:
        self._now = None

    def _install(self) -> None:
        layer = self._layer
        self._hook(layer.register_forward_pre_hook(plain(self._enter), with_kwargs=True))
        self._hook(layer.router.register_forward_hook(plain(self._route)))
        self._hook(layer.experts.register_forward_hook(plain(self._compute)))
        shared = getattr(layer, "shared_experts", None)
        if shared is not None:
            self._hook(shared.register_forward_hook(plain(self._share)))
        self._hook(layer.register_forward_hook(plain(self._leave)))

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        with unseen():
            own = Pass(self._moment(), None, x.shape[1])
            self._now = _Drawn(own, (x.shape[0], x.shape[1]), {"x": own.drawn(x)})

    def _route(self, _: nn.Module, args: object, output: tuple[Tensor, Tensor]) -> None:
        if self._now is not None:
            with unseen():
                probs, chosen = (self._now.own.drawn(each) for each in output)
                self._now.parts |= {"probs": probs, "chosen": chosen}

    def _share(self, _: nn.Module, args: object, output: Tensor) -> None:
        if self._now is not None:
            with unseen():
                self._now.parts["shared"] = self._now.own.drawn(output)

    def _compute(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._now is not None and "probs" in self._now.parts:
            with unseen():
                self._see_rows(self._now, *(each.detach() for each in (*args[:3], output[0])))

    def _leave(self, _: nn.Module, args: object, output: Any) -> None:
        now, self._now = self._now, None
        if now is None or "sum" not in now.parts:
            return
        with unseen():
            y = now.own.drawn(output[0] if isinstance(output, tuple) else output)
            values, magnitude = now.parts["sum"], now.parts["magnitude"]
            lost = torch.finfo(y.dtype).smallest_normal
            steps = self._layer.config.moe_router_topk + self._group.size()
            expected = Reference(values, magnitude, magnitude, lost, steps)
            if "shared" in now.parts:
                expected = expected.plus(total(now.parts["shared"])).again()
            if wrong := num_wrong(y, expected):
                words = "that left the experts are not the sum of what each returned"
                self._tell(f"{wrong} of {y.numel()} drawn elements {words}")

    @property
    def _group(self) -> Any:
        """The ranks that share the experts."""
        return self._layer.token_dispatcher.tp_ep_group

    def _see_rows(
        self, now: _Drawn, rows_SH: Tensor, counts: Tensor, weights_S: Tensor, out_SH: Tensor
    ) -> None:
        """Find the drawn tokens of all ranks among the rows of this rank's experts."""
        x_NH, probs_NE, chosen_NE, place_N, batch_N = self._of_all(now)
        local = list(self._layer.local_expert_indices)
        counts = torch.as_tensor(counts).to(rows_SH.device)
        expert_S = torch.repeat_interleave(counts)
        row, token = _alike(rows_SH, x_NH)
        expert = torch.tensor(local, device=rows_SH.device)[expert_S[row]]
        is_own = chosen_NE[token, expert]
        row, token, expert = row[is_own], token[is_own], expert[is_own]
        found_NE = torch.zeros_like(chosen_NE, dtype=torch.int64)
        found_NE.index_put_((token, expert), torch.ones_like(token), accumulate=True)
        missing = int((chosen_NE[:, local] & (found_NE[:, local] == 0)).sum())
        if missing:
            self._tell(f"{missing} rows of drawn tokens did not reach the experts chosen for them")
        is_single = (found_NE <= 1).all(-1)
        given, weights = probs_NE[token, expert].to(weights_S.dtype), weights_S[row]
        differ = (weights != given) & ~(weights.isnan() & given.isnan())
        if wrong := int((is_single[token] & differ).sum()):
            self._tell(f"{wrong} of {len(row)} drawn rows have other weights than the router's")
        self._compare_places(now, row, token, expert_S, place_N, batch_N, is_single)
        sums = torch.zeros(2, *x_NH.shape, dtype=torch.float64, device=rows_SH.device)
        own = out_SH[row].double()
        sums[0].index_add_(0, token, own.masked_fill(~is_single[token, None], math.nan))
        sums[1].index_add_(0, token, own.abs())
        if missing:
            sums.fill_(math.nan)  # it is named already
        if self._group.size() > 1:
            torch.distributed.all_reduce(sums, group=self._group)
        R = len(now.parts["x"])
        mine = slice(self._group.rank() * R, (self._group.rank() + 1) * R)
        now.parts |= {"sum": sums[0, mine], "magnitude": sums[1, mine]}

    def _of_all(self, now: _Drawn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, probabilities, choice, sequence in its micro-batch, and micro-batch of the drawn tokens of all ranks."""
        x, (T, B) = now.parts["x"], now.shape
        picked = now.own.picked(T * B).to(x.device)
        batch = torch.full_like(picked, now.own.moment.micro_batch)
        own = x, now.parts["probs"], now.parts["chosen"].to(torch.int64), picked % B, batch
        if self._group.size() > 1:
            own = tuple(self._gathered(each) for each in own)  # type: ignore[assignment]
        return own[0], own[1], own[2].bool(), own[3], own[4]

    def _gathered(self, x: Tensor) -> Tensor:
        parts = [x.new_empty(x.shape) for _ in range(self._group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts)

    def _compare_places(
        self,
        now: _Drawn,
        row: Tensor,
        token: Tensor,
        expert_S: Tensor,
        place_N: Tensor,
        batch_N: Tensor,
        is_single: Tensor,
    ) -> None:
        """The sequence and the micro-batch of each row, as the expert has them for its blocks and random numbers."""
        first, wrong = 0, 0
        counts = torch.bincount(expert_S, minlength=len(self._layer.experts.local_experts)).tolist()
        for expert, count in zip(self._layer.experts.local_experts, counts, strict=True):
            inside = (row >= first) & (row < first + count) & is_single[token]
            own, which = row[inside] - first, token[inside]
            first += count
            if not hasattr(expert.linear_fc1, "rows") or not len(own):
                continue
            rows = expert.linear_fc1.rows or Rows(torch.zeros_like(expert_S), 1)
            each = rows.num_sequences // rows.num_sources
            sequence = rows.sequence[own]
            later = torch.tensor(rows.micro_batches, device=own.device)[sequence // each]
            batch = batch_N[which] - now.own.moment.micro_batch
            wrong += int(((sequence % each != place_N[which]) | (later != batch)).sum())
        if wrong:
            words = (
                "drawn rows are of another sequence or micro-batch than their experts take them for"
            )
            self._tell(f"{wrong} of {len(row)} {words}")

    def _tell(self, words: str) -> None:
        micro_batch = self._now.own.moment.micro_batch if self._now else self._moment().micro_batch
        self._report(f"{self._name}: {words}, in micro-batch {micro_batch}")


def _alike(rows_SH: Tensor, x_NH: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of a row and a token with the same bits."""
    rows, tokens = as_integers(rows_SH), as_integers(x_NH)
    near = (rows[:, None, :_FIRST] == tokens[None, :, :_FIRST]).all(-1)
    row, token = near.nonzero(as_tuple=True)
    same = (rows[row] == tokens[token]).all(-1)
    return row[same], token[same]
