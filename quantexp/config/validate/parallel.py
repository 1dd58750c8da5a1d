"""Layouts and requests for processes that cannot run, refused before the launch.

Each message names the key, what it must satisfy, its value and a value that does. What the blocks of a scheme allow is
checked by `quantexp.quant.alignment`; what one kind of launcher alone refuses, by that launcher.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from quantexp.errors import ConfigError
from quantexp.model.decoder import linear_shapes, shared_width
from quantexp.model.layout import Layout
from quantexp.model.sizes import padded_vocab_size
from quantexp.schema import (
    AttentionPath,
    Dispatcher,
    Experiment,
    JobConfig,
    LauncherConfig,
    ModelConfig,
    ParallelConfig,
    SlurmConfig,
)
from quantexp.schema.launcher import SLURM
from quantexp.schema.limits import check_limits, next_multiple

#: Why a size is impossible, after its key; None if it is possible.
_Obstacle = Callable[[int], str | None]


def validate_parallel(experiment: Experiment) -> None:
    """Refuse a layout that Megatron cannot build, or whose numbers would be wrong.

    Raises:
        ConfigError: names the first invalid key.
    """
    check_limits("parallel", experiment.parallel)
    _meaningful(experiment)
    _tensor(experiment)
    _pipeline(experiment)
    _ranks(experiment)
    _experts(experiment)
    _tokens(experiment)


def _meaningful(experiment: Experiment) -> None:
    """Refuse keys without an effect, and layouts that no code computes."""
    parallel, moe = experiment.parallel, experiment.model.moe
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("parallel.sequence=true needs parallel.tensor above 1, got 1; drop it")
    if parallel.sequence is False and parallel.tensor > 1 and moe is not None:
        raise ConfigError(
            f"parallel.sequence must be true with experts (model.moe) and parallel.tensor={parallel.tensor}, got "
            "false; drop it"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs parallel.pipeline above 1, got 1; drop it"
        )
    if parallel.context > 1 and experiment.training.attention is AttentionPath.fused:
        raise ConfigError(
            "training.attention must be plain or tiled with parallel.context="
            f"{parallel.context}, whose ranks mask keys row by row, got fused; take training.attention=tiled"
        )
    _expert_keys(experiment.model, parallel)


def _expert_keys(model: ModelConfig, parallel: ParallelConfig) -> None:
    without = [
        ("expert", parallel.expert, parallel.expert == 1),
        ("expert_tensor", parallel.expert_tensor, parallel.expert_tensor is None),
        ("dispatcher", parallel.dispatcher.value, parallel.dispatcher is Dispatcher.allgather),
    ]
    for key, value, is_default in without:
        if model.moe is None and not is_default:
            raise ConfigError(
                f"parallel.{key}={value} needs a model with experts (model.moe), and {model.name} has none; drop it"
            )
    if parallel.expert > 1:
        return
    if parallel.expert_tensor not in (None, parallel.tensor):
        raise ConfigError(
            f"parallel.expert_tensor must be parallel.tensor={parallel.tensor} with parallel.expert=1, because the "
            f"gradients of the experts would not be summed, got {parallel.expert_tensor}; drop it, or take "
            "parallel.expert above 1"
        )
    if parallel.dispatcher is Dispatcher.alltoall:
        raise ConfigError(
            "parallel.dispatcher=alltoall needs parallel.expert above 1, got 1; drop it"
        )


def _tensor(experiment: Experiment) -> None:
    model, parallel = experiment.model, experiment.parallel

    def obstacle(size: int) -> str | None:
        for name, width in _divided_by_tensor(model, parallel):
            if width % size:
                return f"must divide {name}={width}"
        groups = model.num_query_groups
        if groups % size and size % groups:
            return f"must divide model.num_query_groups={groups} or be a multiple of it"
        return None

    _require_possible("parallel.tensor", parallel.tensor, obstacle)


def _divided_by_tensor(model: ModelConfig, parallel: ParallelConfig) -> Iterator[tuple[str, int]]:
    """The numbers that the ranks of a tensor-parallel group share evenly, with their names."""
    moe, mla = model.moe, model.mla
    yield "model.num_attention_heads", model.num_attention_heads
    if mla is None:
        yield "the rows of qkv", linear_shapes(model, 0)["qkv"].output_width
    else:
        latent = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        yield "model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim", latent
        if mla.q_lora_rank is not None:
            yield "model.mla.q_lora_rank", mla.q_lora_rank
    if moe is None or moe.num_dense_layers:
        yield "model.ffn_hidden_size", model.ffn_hidden_size
    if moe is not None:
        name = "model.moe.expert_ffn_hidden_size"
        if moe.num_shared_experts:
            yield f"model.moe.num_shared_experts x {name}", shared_width(moe)
        if parallel.expert == 1:
            yield name, moe.expert_ffn_hidden_size
    yield "the padded rows of the vocabulary", padded_vocab_size(model.vocab_size)


def _pipeline(experiment: Experiment) -> None:
    layers, parallel = experiment.model.num_layers, experiment.parallel
    chunks = parallel.virtual_pipeline
    if chunks > 1:
        parts = parallel.pipeline * chunks
        if layers % parts:
            raise ConfigError(
                f"parallel.pipeline x parallel.virtual_pipeline = {parallel.pipeline} x {chunks} = {parts} must divide "
                f"model.num_layers={layers}; drop parallel.virtual_pipeline, or choose other sizes"
            )
        return

    def obstacle(stages: int) -> str | None:
        each = math.ceil(layers / stages)
        full = math.ceil(layers / each)
        if full == stages:
            return None
        return (
            f"must leave a layer for every stage, and model.num_layers={layers} in stages of {each} fill "
            f"{full} of them"
        )

    _require_possible("parallel.pipeline", parallel.pipeline, obstacle)


def _ranks(experiment: Experiment) -> None:
    parallel, processes = experiment.parallel, experiment.launcher.num_processes
    sizes = (parallel.tensor, parallel.context, parallel.pipeline)
    together = math.prod(sizes)
    if processes % together:
        raise ConfigError(
            "launcher.num_processes must be a multiple of parallel.tensor x parallel.context x parallel.pipeline = "
            f"{' x '.join(map(str, sizes))} = {together}, got {processes}; take launcher.num_processes="
            f"{next_multiple(processes, together)}, or smaller sizes"
        )


def _experts(experiment: Experiment) -> None:
    """Refuse groups of experts that do not fit in a stage, and experts that do not divide."""
    parallel, moe = experiment.parallel, experiment.model.moe
    if moe is None or parallel.expert == 1:
        return
    layout = Layout.of(experiment)
    _require_possible("parallel.expert", parallel.expert, _divides(moe.num_experts, "num_experts"))
    _require_possible(
        "parallel.expert_tensor",
        layout.expert_tensor,
        _divides(moe.expert_ffn_hidden_size, "expert_ffn_hidden_size"),
    )
    in_stage, group = layout.num_processes // layout.pipeline, layout.expert * layout.expert_tensor
    if in_stage % group:
        raise ConfigError(
            f"parallel.expert x parallel.expert_tensor = {layout.expert} x {layout.expert_tensor} = {group} must "
            f"divide launcher.num_processes / parallel.pipeline = {in_stage}; take parallel.expert="
            f"{math.gcd(in_stage // math.gcd(in_stage, layout.expert_tensor), layout.expert)}, or other sizes"
        )


def _divides(width: int, name: str) -> _Obstacle:
    return lambda size: f"must divide model.moe.{name}={width}" if width % size else None


def _tokens(experiment: Experiment) -> None:
    """Refuse sequences that do not divide: a rank has two ranges of each; sequence parallelism divides them."""
    layout, length = Layout.of(experiment), experiment.training.seq_length
    factors = [2 * layout.context] if layout.context > 1 else []
    words = ["2 x parallel.context"] if layout.context > 1 else []
    if layout.sequence:
        factors.append(layout.context * layout.tensor)
        of_context = " x parallel.context" if layout.context > 1 else ""
        words.append(f"parallel.tensor{of_context} (sequence parallelism)")
    multiple = math.lcm(*factors)
    if length % multiple:
        raise ConfigError(
            f"training.seq_length must be a multiple of {multiple}, for {' and '.join(words)}, got {length}; take "
            f"training.seq_length={max(1, length // multiple) * multiple}"
        )


def _require_possible(key: str, size: int, obstacle: _Obstacle) -> None:
    """Refuse an impossible size, with the largest smaller one that is possible; 1 always is."""
    why = obstacle(size)
    if why is not None:
        smaller = next(n for n in range(size - 1, 0, -1) if obstacle(n) is None)
        raise ConfigError(f"{key} {why}, got {size}; take {key}={smaller}")


def validate_launcher(experiment: Experiment) -> None:
    """Refuse a layout or a request that cannot run.

    Raises:
        ConfigError: names the first invalid key.
    """
    launcher = experiment.launcher
    if launcher.kind != SLURM:
        _unused(launcher)
    check_limits("launcher", launcher)
    check_share_of_batch(experiment)
    if not launcher.is_local:
        _job(launcher)


def check_share_of_batch(experiment: Experiment) -> None:
    """Refuse a batch that does not divide among the data-parallel ranks.

    Raises:
        ConfigError: names the batch and its divisor.
    """
    layout, training = Layout.of(experiment), experiment.training
    together = training.micro_batch_size * layout.micro_batches_together
    if training.global_batch_size % together:
        raise ConfigError(
            f"training.global_batch_size must be a multiple of training.micro_batch_size x "
            f"{layout.micro_batches_in_words} = {training.micro_batch_size} x {layout.micro_batches_together} = "
            f"{together}, got {training.global_batch_size}; take training.global_batch_size="
            f"{next_multiple(training.global_batch_size, together)}"
        )


def _unused(launcher: LauncherConfig) -> None:
    """Refuse keys that the launcher's kind does not read."""
    plain = SlurmConfig()
    of_any_job = {field.name for field in dataclasses.fields(JobConfig)}
    for key in (field.name for field in dataclasses.fields(SlurmConfig)):
        if key in of_any_job and not launcher.is_local:
            continue
        if getattr(launcher, key) != getattr(plain, key):
            raise ConfigError(
                f"launcher.{key}={getattr(launcher, key)} is for SLURM and has no effect under "
                f"launcher.kind={launcher.kind}; add launcher=slurm, or drop it"
            )


def _job(launcher: LauncherConfig) -> None:
    """Refuse resources that no cluster can give."""
    if launcher.num_processes % launcher.nodes:
        raise ConfigError(
            f"launcher.num_processes must be a multiple of launcher.nodes={launcher.nodes}, got "
            f"{launcher.num_processes}; take launcher.num_processes="
            f"{next_multiple(launcher.num_processes, launcher.nodes)}"
        )
    processes_per_node = launcher.num_processes // launcher.nodes
    if launcher.gpus_per_node not in (0, processes_per_node):
        raise ConfigError(
            f"launcher.gpus_per_node must be 0 (CPU) or {processes_per_node}, a GPU for each of a node's processes "
            f"(launcher.num_processes={launcher.num_processes} over launcher.nodes={launcher.nodes}), got "
            f"{launcher.gpus_per_node}"
        )
    if launcher.gpu_type is not None and not launcher.gpus_per_node:
        raise ConfigError(
            f"launcher.gpu_type={launcher.gpu_type} needs launcher.gpus_per_node of at least 1"
        )
    if launcher.detach:
        raise ConfigError(
            "launcher.detach=true is for runs of this machine: a job is never waited for; drop it"
        )
