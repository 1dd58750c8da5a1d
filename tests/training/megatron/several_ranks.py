"""Runs one model in several layouts on several processes of this machine, over gloo, without the trainer.

Each rank fills its parts with initial weights, saves the model, reads it back, and fails on purpose; what it did is in
`Rank`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.model.checkpoints import PADDING, folder_of
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.layout import Layout, Place
from quantexp.model.shards import Shard
from quantexp.model.sizes import padded_vocab_size
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank as RunRank
from quantexp.schema import ModelConfig, ParallelConfig, Precision
from quantexp.training.context import RunContext
from quantexp.training.megatron.cpu import cpu_device
from quantexp.training.megatron.initial_weights import draw_weights, load_weights
from quantexp.training.megatron.parameters import mark_divided, parts_of
from quantexp.training.megatron.specs import stock_spec
from quantexp.training.megatron.state_shards import RankState
from quantexp.training.megatron.transformer_config import transformer_config
from quantexp.training.saver import make_saver
from tests.model.huggingface.layouts import MODELS
from tests.model.huggingface.published import training

SEED = 77


@dataclasses.dataclass
class Rank:
    """What one rank had and did in one layout."""

    place: Place
    #: By global name.
    initial: dict[str, tuple[Shard, Tensor]]
    loaded: dict[str, Tensor]
    #: Parameters that Megatron takes for divided.
    divided: set[str]
    bytes_read: int
    #: The words that ended a save with a weight that is not finite, and one to a folder that cannot be written.
    nonfinite: str
    unwritable: str


def run_layouts(layouts: dict[str, tuple[str, Layout]], folder: Path) -> dict[str, list[Rank]]:
    """The ranks of each layout, all of which have the same number of processes; folders are `folder / case`."""
    world = next(iter(layouts.values()))[1].num_processes
    with ProcessPoolExecutor(world, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_run, rank, world, layouts, folder) for rank in range(world)]
        ranks = [future.result() for future in futures]
    return {case: [rank[case] for rank in ranks] for case in layouts}


def _run(
    rank: int, world: int, layouts: dict[str, tuple[str, Layout]], folder: Path
) -> dict[str, Rank]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with cpu_device():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world
        )
        try:
            return {
                case: _in_layout(MODELS[family], layout, rank, folder / case)
                for case, (family, layout) in layouts.items()
            }
        finally:
            torch.distributed.destroy_process_group()


def _in_layout(model: ModelConfig, layout: Layout, rank: int, folder: Path) -> Rank:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(layout),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        return _exercise(model, layout, rank, folder)
    finally:
        parallel_state.destroy_model_parallel()


def _exercise(model: ModelConfig, layout: Layout, rank: int, folder: Path) -> Rank:
    place = layout.place(rank)
    chunks = build_chunks(model, layout, place)
    parts = parts_of(chunks, model, layout, place)
    mark_divided(parts)
    draw_weights(parts, model, SEED)
    initial = {name: (part.shard, part.tensor.detach().clone()) for name, part in parts.items()}
    context = _context(model, layout, rank, folder)
    assert _words_of_save(context, chunks, 1) == "no error"
    bytes_read = _load(parts, folder_of(context.run, 1))
    divided = {n for n, p in parts.items() if getattr(p.tensor, "tensor_model_parallel", False)}
    loaded = {name: part.tensor.detach().clone() for name, part in parts.items()}
    last = f"decoder.layers.{model.num_layers - 1}.self_attention.linear_proj.weight"
    if last in parts:
        torch.nn.init.constant_(parts[last].tensor, float("nan"))
    nonfinite = _words_of_save(context, chunks, 3)
    if last in parts:
        torch.nn.init.zeros_(parts[last].tensor)
    torch.distributed.barrier()
    if rank == 0:
        context.run.checkpoints.rename(folder / "earlier")
        context.run.checkpoints.write_text("")
    torch.distributed.barrier()
    unwritable = _words_of_save(context, chunks, 2)
    return Rank(place, initial, loaded, divided, bytes_read, nonfinite, unwritable)


def _context(model: ModelConfig, layout: Layout, rank: int, folder: Path) -> RunContext:
    folder.mkdir(parents=True, exist_ok=True)
    experiment = compose(["training=fast", "capture=off", "checkpoint.every=1"], None, {})
    experiment.model, experiment.training.precision = model, Precision.bf16
    experiment.launcher.num_processes = layout.num_processes
    experiment.parallel = ParallelConfig(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.chunks,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
    )
    return RunContext(RunDir(folder), experiment, RunRank(rank, layout.num_processes, rank))


def build_chunks(model: ModelConfig, layout: Layout, place: Place) -> list[GPTModel]:
    """A rank's chunks, with weights that are not initialised."""
    config = dataclasses.replace(
        transformer_config(model, training(Precision.bf16)),
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(layout),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    return [_build_chunk(model, layout, place, chunk, config) for chunk in range(layout.chunks)]


def _build_chunk(
    model: ModelConfig, layout: Layout, place: Place, chunk: int, config: Any
) -> GPTModel:
    layers = layout.layers(model.num_layers, place.pipeline, chunk)
    spec = stock_spec(model)
    spec.layer_specs = spec.layer_specs[layers.start : layers.stop]
    return GPTModel(
        config,
        spec,
        vocab_size=padded_vocab_size(model.vocab_size),
        max_sequence_length=32,
        pre_process=layers.start == 0,
        post_process=layers.stop == model.num_layers,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        vp_stage=None if layout.chunks == 1 else chunk,
    )


def _virtual(layout: Layout) -> int | None:
    return None if layout.chunks == 1 else layout.chunks


def _words_of_save(context: RunContext, chunks: list[GPTModel], iteration: int) -> str:
    """Save the weights alone, and return the error in words."""

    def no_state() -> RankState:
        raise AssertionError("no training state is saved")

    with contextlib.closing(make_saver(context)) as saver:
        try:
            saver.save(iteration, chunks, no_state, 0)
            saver.finish()
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
    return "no error"


def _load(parts: Any, folder: Path) -> int:
    """Overwrite the parts, read them back, and return the bytes that this process read for it."""
    for part in parts.values():
        torch.nn.init.constant_(part.tensor, -1.0)
    torch.distributed.barrier()
    weights, padding = open_weights(folder), open_weights(folder / PADDING)
    before = _bytes_read()
    load_weights(parts, weights, padding)
    return _bytes_read() - before


def _bytes_read() -> int:
    """What this process has received from `read` so far, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar: ")).split()[1])
