"""What a rank of `test_experts` does: sends tokens that name themselves through Megatron's dispatchers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from quantexp.training.megatron.cpu import cpu_device
from quantexp.training.megatron.experts import pass_rows_to_experts
from quantexp.training.megatron.linear import SchemeColumnParallelLinear

NUM_EXPERTS, TOP_K, T, B, WIDTH = 4, 2, 8, 3, 4
DISPATCHERS = {"allgather": MoEAllGatherTokenDispatcher, "alltoall": MoEAlltoAllTokenDispatcher}
#: Of two ranks: expert parallel, tensor parallel with each expert on both, tensor parallel with whole experts.
LAYOUTS = {"ep2": (1, 2, 1), "tp2 etp2": (2, 1, 2), "tp2 ep2": (2, 2, 1)}
#: Source, column and position of each row of an expert as its tokens say, and as `Rows` says (source and column);
#: the number of sequences, and the micro-batches of the sources.
Expert = tuple[list[tuple[int, int, int]], list[tuple[int, int]], tuple[int, tuple[int, ...]]]


class Experts(nn.Module):
    """Experts that keep their rows."""

    def __init__(self, num_local: int) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(nn.Module() for _ in range(num_local))
        for expert in self.local_experts:
            for name in ("linear_fc1", "linear_fc2"):
                linear = SchemeColumnParallelLinear.__new__(SchemeColumnParallelLinear)
                nn.Module.__init__(linear)
                setattr(expert, name, linear)
        self.report: list[Expert] = []

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """The rows unchanged."""
        for expert, rows_x in zip(
            self.local_experts, x.split(tokens_per_expert.tolist()), strict=True
        ):
            rows: Any = expert.linear_fc1.rows
            truth = [(int(s), int(b), int(t)) for s, b, t, _ in rows_x.tolist()]
            each = rows.num_sequences // rows.num_sources
            said = [divmod(int(number), each) for number in rows.sequence]
            self.report.append((truth, said, (rows.num_sequences, rows.micro_batches)))
        return x


class Mixture(nn.Module):
    """A mixture-of-experts layer without router."""

    def __init__(self, kind: str, config: TransformerConfig, expert_parallel: int) -> None:
        super().__init__()
        each = NUM_EXPERTS // expert_parallel
        first = parallel_state.get_expert_model_parallel_rank() * each
        self.token_dispatcher = DISPATCHERS[kind](
            each, list(range(first, first + each)), config, get_default_pg_collection()
        )
        self.experts = Experts(each)

    def forward(self, hidden_TBH: Tensor, routed: Tensor) -> Tensor:
        """The tokens, each as often as it has experts."""
        dispatcher, probs = self.token_dispatcher, routed.float()
        x, probs = dispatcher.dispatch_preprocess(hidden_TBH, routed, probs)
        x, probs = dispatcher.token_dispatch(x, probs)
        x, tokens_per_expert, _ = dispatcher.dispatch_postprocess(x, probs)
        x = dispatcher.combine_preprocess(self.experts(x, tokens_per_expert))
        result: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(x))
        return result


def dispatched(rank: int, layout: str, kind: str) -> list[Expert]:
    """One layer's report; each token is [source, column, position, 1]."""
    tensor, expert, expert_tensor = LAYOUTS[layout]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOP_K,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        sequence_parallel=tensor > 1,
        moe_token_dispatcher_type=kind,
        use_cpu_initialization=True,
        add_bias_linear=False,
    )
    own = T // tensor
    position = torch.arange(own) + (rank % tensor) * own
    tokens = torch.ones(own, B, WIDTH)
    tokens[..., 0] = rank // tensor
    tokens[..., 1] = torch.arange(B)
    tokens[..., 2] = position[:, None]
    scores = torch.rand(own * B, NUM_EXPERTS, generator=torch.Generator().manual_seed(rank))
    routed = torch.zeros_like(scores, dtype=torch.bool)
    routed.scatter_(1, scores.topk(TOP_K).indices, True)
    mixture = Mixture(kind, config, expert)
    pass_rows_to_experts(mixture)
    result = mixture(tokens, routed)
    assert torch.equal(result, tokens * TOP_K * expert_tensor), "every token came back"
    parallel_state.destroy_model_parallel()
    return mixture.experts.report


def dispatch(rank: int) -> dict[tuple[str, str], list[Expert]]:
    """Every layout and dispatcher."""
    with cpu_device():
        return {
            (layout, kind): dispatched(rank, layout, kind)
            for layout in LAYOUTS
            for kind in DISPATCHERS
        }
