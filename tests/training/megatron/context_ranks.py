"""What a rank of `test_context_attention` does: core attention with half of each sequence, against all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from quantexp.errors import ConfigError
from quantexp.proof.attention_border import AttentionBorder
from quantexp.proof.border import COMPLETE
from quantexp.proof.draws import Moment
from quantexp.proof.histories import Histories
from quantexp.proof.verdict import Observed, status_of
from quantexp.proof.watch import ProductWatch
from quantexp.quant.attention import context_parallel, tiles
from quantexp.quant.attention.context_parallel import SequenceShare
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.quant.whole_amax import use_reduction
from quantexp.schema import AttentionPath
from quantexp.training.megatron.attention import SchemeAttention
from quantexp.training.megatron.cpu import cpu_device
from quantexp.training.megatron.shares import sequence_shares
from tests.quant.attention.kernels.tiled_cases import far, fresh

T, B, H, G, D, NUM_RANKS = 128, 2, 4, 2, 32, 2
#: Relative distances of o, dq, dk and dv.
Distances = list[float]
#: Distances, and the statuses of all slots, by scheme, path and case.
Report = dict[tuple[str, str, str], tuple[Distances, list[str]]]


def core_attention(
    num_ranks: int, precision: ModulePrecision, path: str, dtype: torch.dtype = torch.float32
) -> SchemeAttention:
    """Megatron's module as a model builds it."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H * D,
        num_attention_heads=H,
        num_query_groups=G,
        kv_channels=D,
        attention_dropout=0.0,
        context_parallel_size=num_ranks,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        bf16=dtype is torch.bfloat16,
    )
    core = SchemeAttention(config, 1, AttnMaskType.causal, "self")
    core.precision, core.path = precision, AttentionPath[path]
    return core


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dO; the last quarter of the sequence, on rank 0, is 9 times as large."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(T, B, H, D), (T, B, G, D), (T, B, G, D), (T, B, H * D)]
    result = [torch.randn(shape, generator=generator) for shape in shapes]
    for x in result[1:]:
        x[3 * T // 4 :] *= 9
    return [(x / 3).to(dtype) for x in result]


def documents() -> Tensor:
    """Causal, and the tokens of each sequence from 40 or 50 on do not see earlier ones, [B, 1, T, T]."""
    t = torch.arange(T)
    later = t[None] > t[:, None]
    starts = torch.tensor([40, 50])[:, None, None]
    return (later | ((t[:, None] >= starts) & (t[None] < starts)))[:, None]


def results(core: SchemeAttention, qkv_dO: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """o and the gradients of q, k and v."""
    leaves = fresh(qkv_dO[:3])
    o = core(*leaves, mask)
    o.backward(qkv_dO[3])
    return [o.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def own(x: Tensor) -> Tensor:
    """This rank's tokens."""
    rank = torch.distributed.get_rank()
    return SequenceShare(rank, NUM_RANKS, lambda x: [], lambda x: x).own_rows(x)


def maximum(module: ModuleId, amax: Tensor) -> Tensor:
    """The reduction that training registers."""
    amax = amax.clone()
    group = parallel_state.get_context_parallel_group()
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    return amax


def compared(
    precision: ModulePrecision, path: str, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Distances, list[str]]:
    """Half of each sequence against the same rows of all of it."""
    whole = tensors(dtype)
    theirs = results(core_attention(1, precision, path, dtype), whole, mask)
    core = core_attention(NUM_RANKS, precision, path, dtype)
    observed = Observed({precision.module: precision}, {})
    border = AttentionBorder(
        core,
        precision,
        observed,
        lambda: Moment(1, 1),
        maximum,
        Histories(),
        COMPLETE,
        softmax_scale=core.softmax_scale,
        shares=sequence_shares(),
        uses_kernels=lambda q, v: False,
    )
    watch = ProductWatch(observed, {precision.module: border}, {})
    with use_reduction(maximum), watch.watching():
        parts = [own(x) for x in whole]
        ours = results(core, parts, mask)
    assert not [check.wrong for check in observed.products.values() if check.wrong]
    assert len(observed.products) == 6
    assert not observed.others
    with use_reduction(maximum):
        again = results(core_attention(NUM_RANKS, precision, path, dtype), parts, mask)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "watched or not"
    assert {x.dtype for x in ours} == {dtype}
    distances = [far(a, own(b)) for a, b in zip(ours, theirs, strict=True)]
    return distances, [str(status_of(slot)[0].value) for slot in watch.observed.slots.values()]


@contextmanager
def chunks_in_order_of_ranks() -> Iterator[None]:
    """Gather as if rank r held the tokens after those of rank r - 1."""
    right = context_parallel.chunks_of
    context_parallel.chunks_of = lambda rank, num_ranks: (2 * rank, 2 * rank + 1)
    try:
        yield
    finally:
        context_parallel.chunks_of = right


def attend(rank: int, precisions: dict[str, ModulePrecision]) -> Report:
    """Every scheme and path; and what must go wrong."""
    parallel_state.initialize_model_parallel(context_parallel_size=NUM_RANKS)
    tiles.ROWS = 32
    report: Report = {}
    with cpu_device(), use_step_state(StepState(1)):
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        for name, precision in precisions.items():
            for path in ("plain", "tiled"):
                report[name, path, "causal"] = compared(precision, path, None, torch.float32)
            mask = documents()
            report[name, "tiled", "documents"] = compared(precision, "tiled", mask, torch.float32)
        mxfp8 = precisions["mxfp8"]
        report["mxfp8", "plain", "documents"] = compared(mxfp8, "plain", mask, torch.float32)
        for path in ("plain", "tiled"):
            report["mxfp8", path, "bf16"] = compared(mxfp8, path, None, torch.bfloat16)
        report["wrong order", "plain", "causal"] = wrong_order(mxfp8)
        report["fused", "", refusal(mxfp8)] = [], []
    return report


def wrong_order(precision: ModulePrecision) -> tuple[Distances, list[str]]:
    """The zigzag rows of one process against an attention that takes them for neighbours."""
    whole = tensors(torch.float32)
    theirs = [own(x) for x in results(core_attention(1, precision, "plain"), whole, None)]
    parts = [own(x) for x in whole]
    with chunks_in_order_of_ranks():
        ours = results(core_attention(NUM_RANKS, precision, "plain"), parts, None)
    return [far(a, b) for a, b in zip(ours, theirs, strict=True)], []


def refusal(precision: ModulePrecision) -> str:
    """The words of the fused path."""
    core = core_attention(NUM_RANKS, precision, "fused")
    try:
        core(*(own(x) for x in tensors(torch.float32)[:3]), None)
    except ConfigError as error:
        return str(error)
    return "none"
