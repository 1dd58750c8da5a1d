"""Muon moves the decoder's matrices as torch.optim.Muon moves each published matrix, in any layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantexp_launchers.local.execute import execute
from rich.console import Console
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.huggingface.parameters import Parameter
from quantexp.model.layout import Layout
from quantexp.runs.metrics import read_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.status import State
from quantexp.training.megatron.muon import Matrix, MuonAndAdamW, is_matrix, orthogonalised
from quantexp.training.megatron.rounded_pieces import RoundedPiece
from tests.conftest import TINY

RunTiny = Callable[..., RunDir]
MUON = ["training.optimizer=muon", "capture=off", "quant=linear_mxfp8"]


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_orthogonalised_is_what_torchs_muon_subtracts(shape: tuple[int, int]) -> None:
    """From zero weights, at a rate of 1, without decay and momentum, to the bit.

    The factor of the "original" rate is sqrt(rows / columns) of a tall matrix: 2 here.
    """
    torch.manual_seed(0)
    x = torch.randn(shape)
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = x.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0).step()
    factor = 2.0 if shape[0] > shape[1] else 1.0
    assert torch.equal(weight.detach(), -factor * orthogonalised(x).float())
    values = torch.linalg.svdvals(orthogonalised(x).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert not orthogonalised(torch.zeros(8, 4)).any()


def tiny_parameters() -> dict[str, Parameter]:
    model = compose(["model=tiny", "model.num_query_groups=2", "model.num_attention_heads=4"]).model
    return {each.name: each for each in mapping(model)}


def published_rows(name: str, groups: int, heads: int, head_dim: int, ffn: int) -> list[Tensor]:
    """Of Megatron's fused weights: the rows of q, k and v, or of gate and up, by their documented order."""
    if name.endswith("linear_fc1.weight"):
        return [torch.arange(ffn), torch.arange(ffn, 2 * ffn)]
    each = (heads // groups + 2) * head_dim  # a group's queries, then its key and its value
    first = torch.arange(groups)[:, None] * each
    query = (first + torch.arange(heads // groups * head_dim)).flatten()
    key = (first + heads // groups * head_dim + torch.arange(head_dim)).flatten()
    return [query, key, key + head_dim]


@pytest.mark.parametrize("owner", ["linear_qkv", "linear_fc1", "linear_fc2", "linear_proj"])
def test_each_published_matrix_moves_as_under_torchs_muon(owner: str) -> None:
    """Within float32's rounding of w: the factor is applied before the rate, not with it."""
    torch.manual_seed(1)
    model = compose(["model=tiny", "model.num_query_groups=2", "model.num_attention_heads=4"]).model
    parameter = tiny_parameters()[f"decoder.layers.0.{_part(owner)}.{owner}.weight"]
    assert is_matrix(parameter)
    own = torch.nn.Parameter(torch.randn(parameter.shape) * 0.02)
    vars(own)["muon"] = Matrix(parameter, Layout(), Layout().place(0))
    norm = torch.nn.Parameter(torch.ones(8))
    group = {"params": [own, norm], "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    optimizer = MuonAndAdamW([group], 0.95)
    rows = [torch.arange(len(own))]
    if owner in ("linear_qkv", "linear_fc1"):
        rows = published_rows(parameter.name, 2, 4, model.head_dim, model.ffn_hidden_size)
        assert sorted(torch.cat(rows).tolist()) == list(range(len(own)))
    parts = [torch.nn.Parameter(own.detach()[each].clone()) for each in rows]
    theirs = torch.optim.Muon(
        parts, lr=1e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    their_norm = torch.nn.Parameter(torch.ones(8))
    adam = torch.optim.AdamW([their_norm], lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        own.grad, norm.grad = torch.randn_like(own), torch.randn_like(norm)
        their_norm.grad = norm.grad.clone()
        for part, each in zip(parts, rows, strict=True):
            part.grad = own.grad[each].clone()
        optimizer.step()
        theirs.step()
        adam.step()
        for part, each in zip(parts, rows, strict=True):
            torch.testing.assert_close(own.detach()[each], part.detach(), rtol=1e-6, atol=1e-9)
    assert torch.equal(norm, their_norm)
    assert set(optimizer.state[own]) == {"step", "momentum"}


def _part(owner: str) -> str:
    return "self_attention" if owner in ("linear_qkv", "linear_proj") else "mlp"


def test_embedding_norms_routers_and_biases_have_adamw() -> None:
    experts = mapping(compose(["model=deepseek2_lite"]).model)
    biased = mapping(compose(["model=tiny", "model.qkv_bias=true"]).model)
    names = [p.name for p in (*experts, *biased) if not is_matrix(p)]
    assert "decoder.layers.1.mlp.router.weight" in names
    assert "embedding.word_embeddings.weight" in names
    assert "decoder.layers.0.self_attention.linear_qkv.bias" in names
    assert not any(".linear_" in name and name.endswith(".weight") for name in names)


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


@pytest.mark.slow
def test_a_run_with_muon_is_another_run_and_learns(run_tiny: RunTiny) -> None:
    words = ["training.iterations=8", "training.warmup_iterations=0", "training.lr=3e-3"]
    run = run_tiny(*MUON, *words)
    other = run_tiny(*MUON, *words, "training.optimizer=adam")
    assert losses(run)[0] == losses(other)[0]
    assert losses(run)[-1] < losses(run)[0] - 0.1
    assert losses(run)[-1] != losses(other)[-1]
    assert run.root != other.root


EXPERTS = [
    *("model=deepseek2_lite", "model.mla=null", "model.num_query_groups=2", "model.head_dim=32"),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=64"),
    *("model.moe.num_shared_experts=0", "model.moe.num_dense_layers=0", "model.qk_norm=true"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (["parallel.tensor=2", "parallel.sequence=true"], []),
        (["parallel.pipeline=2"], []),
        ([], []),
        (["parallel.expert=2"], EXPERTS),
        (["parallel.tensor=2"], EXPERTS),
    ],
    ids=["tp2 sp", "pp2", "dp2", "ep2", "tp2 experts"],
)
def test_layouts_train_alike(layout: list[str], model: list[str], tmp_path: Path) -> None:
    """In fp32 with other orders of sums, 1e-7 in a gradient; rounded to bf16 for the iteration, one element in 10^4
    becomes its neighbour, which moves the loss of the next iterations by less than 1e-5. Matrices that are moved by
    parts of theirs differ by 1e-2.
    """
    words = [*TINY, *model, "training.optimizer=muon", "capture=off", "quant=bf16"]
    words += ["training.precision=fp32", "training.global_batch_size=2", "training.lr=3e-3"]
    words += ["training.micro_batch_size=1"]
    words += ["training.warmup_iterations=0", "training.iterations=4", "launcher.num_threads=1"]
    runs = []
    for number, own in ((1, []), (2, layout)):
        root = f"paths.root={tmp_path / str(number)}"
        outcome = execute(
            compose([*words, *own, f"launcher.num_processes={number}", root]), Console(quiet=True)
        )
        assert outcome.state is State.COMPLETED, outcome.reason
        runs.append(losses(outcome.run))
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[0][-1] < runs[0][0] - 0.05


@pytest.mark.slow
def test_the_momentum_is_rounded_and_proved(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*MUON, "training.iterations=2", "quant.optimizer.momentum.format=mxfp8"]
    run = run_tiny(*words)
    entries = [e for e in read_precision(run.precision)["entries"] if e["site"] == "optimizer"]
    assert [(e["product"], e["operand"], e["status"]) for e in entries] == [
        ("muon", "momentum", "engaged")
    ]
    monkeypatch.setattr(RoundedPiece, "round", lambda *_: None)
    failed = run_tiny(*words, "force=true", expect=1)
    assert "optimizer.muon.momentum of " in json.loads(failed.status.read_text())["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["training.optimizer=muon", "training.distributed_optimizer=true"],
            "orthogonalises whole matrices; drop it",
        ),
        (["training.muon_momentum=0.9"], "training.muon_momentum is for training.optimizer=muon"),
        (
            ["quant.optimizer.momentum.format=mxfp8"],
            "rounds Muon's momentum; add training.optimizer=muon",
        ),
        (["training.optimizer=moun"], "did you mean muon"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    words: list[str], message: str, tiny: Callable[..., object]
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*words)
