"""Whole tensors of a model's modules, divided as Megatron divides them, and recorded by the recorder of each rank.

Tensor parallelism takes neighbouring shares of an axis (arXiv 1909.08053, section 3), of gate and up each; sequence
parallelism neighbouring shares of the tokens outside the products (arXiv 2205.05198, section 4.2); context parallelism
chunks r and 2 CP - 1 - r of the tokens (Megatron-Core's `get_batch_on_this_cp_rank`). Values are small whole numbers,
so that summands add exactly in every dtype.

    # T tokens, B sequences, W width, H query heads, G key-value heads, D head_dim, F feed-forward
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantexp.capture.division import Holder
from quantexp.capture.names import TensorName
from quantexp.capture.operands import source_of
from quantexp.capture.record.recorder import Recorder
from quantexp.capture.statistics.summary import statistics
from quantexp.capture.store.files import Stored
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.manifest import MANIFEST, finish_capture
from quantexp.capture.store.metadata import About
from quantexp.capture.store.values import PLACE, load_values
from quantexp.model.layout import Layout, Place
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.schema import CaptureConfig, CaptureLevel, StoreKind

T, B, W, H, D, F = 64, 2, 8, 4, 4, 12
NUM_GROUPS = 2
#: Whole tensors of one micro-batch: (layer, module, tensor) -> values.
Whole = dict[tuple[int, str, str], Tensor]
_OUT = {"qkv": (H + 2 * NUM_GROUPS) * D, "fc1": 2 * F, "proj": W, "fc2": W}
_IN = {"qkv": W, "fc1": W, "proj": H * D, "fc2": F}
LINEAR = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight", "main_grad")
#: How tensor parallelism divides a tensor: along an axis, along the tokens, or not at all; and the axis.
Rule = tuple[str, int]
ALIKE: Rule = ("alike", 0)
_RESIDUALS = ("pre", "mid", "post")
_OF_SCORES = ("attn_weights", "grad_scores", "grad_attn_weights")

EVERYTHING = CaptureConfig(
    level=CaptureLevel.tensors,
    attn_weights=True,
    weight_grads=True,
    residual=True,
    router_logits=True,
)

#: Tensor parallelism, with sequence parallelism ("tokens" without it is ALIKE).
_TENSOR: dict[tuple[str, str], Rule] = {
    **{("column", t): ("axis", 0) for t in ("weight", "grad_weight", "main_grad")},
    **{("column", t): ("axis", -1) for t in ("output", "grad_output")},
    ("column", "input"): ALIKE,
    ("column", "grad_input"): ("tokens", 0),
    **{("row", t): ("axis", 1) for t in ("weight", "grad_weight", "main_grad")},
    **{("row", t): ("axis", -1) for t in ("input", "grad_input")},
    ("row", "output"): ("tokens", 0),
    ("row", "grad_output"): ALIKE,
    **{("attention", t): ("axis", 2) for t in ("query", "grad_query", "output", "grad_output")},
    **{("attention", t): ("axis", 2) for t in ("key", "value", "grad_key", "grad_value")},
    **{("attention", t): ("axis", 1) for t in _OF_SCORES},
    **{("plain", f"{g}resid_{t}"): ("tokens", 0) for g in ("", "grad_") for t in _RESIDUALS},
    ("plain", "router_logits"): ("tokens", 0),
}
_KINDS = {"qkv": "column", "fc1": "column", "proj": "row", "fc2": "row", "attention": "attention"}
_PHASES = {"input": "pre", "weight": "pre", "query": "pre", "key": "pre", "value": "pre"}


def dense(num_layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Whole:
    """Every tensor of dense layers."""
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for module in ("qkv", "proj", "fc1", "fc2"):
        x, y, w = (T, B, _IN[module]), (T, B, _OUT[module]), (_OUT[module], _IN[module])
        shapes |= {(module, t): s for t, s in zip(LINEAR, (x, w, y, y, x, w, w), strict=True)}
    for prefix in ("", "grad_"):
        shapes["attention", f"{prefix}query"] = (T, B, H, D)
        shapes |= {("attention", prefix + t): (T, B, NUM_GROUPS, D) for t in ("key", "value")}
    shapes |= {("attention", t): (B, H, T, T) for t in ("attn_weights", "grad_scores")}
    shapes |= {("attention", "output"): (T, B, H * D), ("attention", "grad_output"): (T, B, H, D)}
    shapes |= {("residual", t): (T, B, W) for t in ("resid_post", "grad_resid_post")}
    shapes |= {("router", "router_logits"): (T, B, 6)}
    source = torch.Generator().manual_seed(seed)
    return {
        (layer, *key): torch.randint(-60, 60, shape, generator=source).to(dtype)
        for layer in range(num_layers)
        for key, shape in shapes.items()
    }


def experts(num_experts: int, rows: int, seed: int = 0) -> Whole:
    """Every tensor of the experts of layer 0, each with `rows` tokens."""
    source = torch.Generator().manual_seed(seed)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for fc in ("fc1", "fc2"):
        x, y, w = (rows, _IN[fc]), (rows, _OUT[fc]), (_OUT[fc], _IN[fc])
        shapes |= {(fc, t): s for t, s in zip(LINEAR, (x, w, y, y, x, w, w), strict=True)}
    return {
        (0, f"expert{n}-{fc}", t): torch.randint(-60, 60, shape, generator=source).bfloat16()
        for n in range(num_experts)
        for (fc, t), shape in shapes.items()
    }


def local(module: str, tensor: str, x: Tensor, layout: Layout, place: Place) -> Tensor:
    """What a rank has of a dense module's tensor."""
    size, index = layout.context, place.context
    if tensor == "grad_weight":
        x = summand(x, size, index)
    elif tensor not in ("weight", "main_grad") and size > 1:
        axis = 2 if tensor in _OF_SCORES else 0
        chunks = x.chunk(2 * size, axis)
        x = torch.cat([chunks[index], chunks[2 * size - 1 - index]], axis)
    how, axis = _TENSOR[_KINDS.get(module, "plain"), tensor]
    if how == "alike" or (how == "tokens" and not layout.sequence):
        return x
    return share(x, layout.tensor, place.tensor, axis, gated=module == "fc1" and how == "axis")


def of_expert(module: str, tensor: str, x: Tensor, layout: Layout, place: Place) -> Tensor:
    """What a rank that holds an expert has of its tensor."""
    how, axis = _TENSOR["column" if module.endswith("fc1") else "row", tensor]
    size, index = layout.expert_tensor, place.expert_tensor
    if how == "tokens":
        return summand(x, size, index)
    if how == "alike":
        return x
    return share(x, size, index, axis, gated=module.endswith("fc1"))


def share(x: Tensor, size: int, index: int, axis: int, *, gated: bool = False) -> Tensor:
    """A neighbouring share of an axis; of each half of it if it has gate and up."""
    if gated:
        return torch.cat([half.chunk(size, axis)[index] for half in x.chunk(2, axis)], axis)
    return x.chunk(size, axis)[index]


def summand(x: Tensor, size: int, index: int) -> Tensor:
    """A rank's summand, of whole numbers each rank's own: the first rank has the rest; of others an exact half."""
    if not torch.equal(x, x.round()):
        return x / size
    others = [torch.full_like(x, 1 + rank) for rank in range(1, size)]
    return others[index - 1] if index else x - sum(others, torch.zeros_like(x))


def record(
    folder: Path,
    layout: Layout,
    tensors_of: Callable[[int, Place], Whole],
    *,
    capture: CaptureConfig = EVERYTHING,
    kind: StoreKind = StoreKind.safetensors,
    ranks: Iterable[int] | None = None,
    end: bool = True,
) -> None:
    """Record each rank's own tensors in iteration 1, micro-batch 0."""
    for rank in ranks if ranks is not None else range(layout.num_processes):
        place = layout.place(rank)
        store = CaptureStore(folder, rank, kind=kind)
        holder = Holder(layout, place, NUM_GROUPS)
        recorder = Recorder(
            capture,
            store,
            rank,
            lambda progress: None,
            layout.num_processes,
            "20260101_000000",
            holder=holder,
            num_layers=2,
        )
        recorder.begin(1, 0)
        for (layer, name, tensor), x in tensors_of(rank, place).items():
            _hook(recorder, ModuleId(layer, name))(tensor, x)
        recorder.flush()
        store.close()
    if end:
        finish_capture(folder)


def _hook(recorder: Recorder, module: ModuleId) -> Callable[[str, Tensor], None]:
    precision = ModulePrecision(module, {})
    hook = recorder.hook(module, lambda: precision, lambda tensor: {"softmax_scale": None})

    def look(tensor: str, x: Tensor) -> None:
        operation = "backward" if "grad" in tensor else "forward"
        hook(operation, _PHASES.get(tensor, "post"), tensor, x)
        if tensor == "weight":
            hook("backward", "pre", tensor, x)

    return look


def with_shared_heads(whole: Whole, layout: Layout) -> Callable[[int, Place], Whole]:
    """`of_dense` where two ranks share each key-value head: their gradients of it are summands."""
    key_value = {"key", "value", "grad_key", "grad_value"}
    others = of_dense({k: x for k, x in whole.items() if k[2] not in key_value}, layout)

    def tensors_of(rank: int, place: Place) -> Whole:
        head, sharing = divmod(place.tensor, 2)
        own = {
            key: share(x, NUM_GROUPS, head, 2) for key, x in whole.items() if key[2] in key_value
        }
        for key in own:
            if key[2].startswith("grad_"):
                own[key] = summand(own[key], 2, sharing)
        return others(rank, place) | own

    return tensors_of


def of_experts(wholes: list[Whole], layout: Layout) -> Callable[[int, Place], Whole]:
    """What each rank has of the experts of layer 0; `wholes` by the groups of ranks that hold the same experts."""
    num_experts = len({module.partition("-")[0] for _, module, _ in wholes[0]})

    def tensors_of(rank: int, place: Place) -> Whole:
        own = [f"expert{n}" for n in layout.experts(num_experts, place)]
        return {
            (layer, module, tensor): of_expert(module, tensor, x, layout, place)
            for (layer, module, tensor), x in wholes[place.expert_data].items()
            if module.partition("-")[0] in own
        }

    return tensors_of


def of_dense(whole: Whole, layout: Layout, num_layers: int = 2) -> Callable[[int, Place], Whole]:
    """What each rank has of dense layers, by stage."""

    def tensors_of(rank: int, place: Place) -> Whole:
        own = layout.stage_layers(num_layers, place.pipeline)
        return {
            (layer, module, tensor): local(module, tensor, x, layout, place)
            for (layer, module, tensor), x in whole.items()
            if layer in own
        }

    return tensors_of


def divide(whole: Path, to: Path, layout: Layout, num_query_groups: int) -> None:
    """Write the capture of one process as the ranks of a layout would have stored it; every layer on every stage."""
    manifest = [json.loads(line) for line in (whole / MANIFEST).read_text().splitlines()]
    for rank, place in layout.places():
        store, holder = CaptureStore(to, rank), Holder(layout, place, num_query_groups)
        stored: dict[str, tuple[Stored, About]] = {}
        for number, line in enumerate(manifest):
            if not holder.stores(line["module"], line["tensor"]):
                continue
            if line["file"] in stored:
                first, about = stored[line["file"]]
                store.refer(first, about.with_more(operation=line["operation"]))
                continue
            x = load_values(whole / line["file"], line)
            about, own = _divided({k: v for k, v in line.items() if k not in PLACE}, x, holder)
            counter = number * layout.num_processes + rank
            name = TensorName(*(line[field.name] for field in dataclasses.fields(TensorName)))
            store.add(name.file("20260101_000000", counter), own, about)
            store.add_statistics(about)
            assert store.last is not None
            stored[line["file"]] = store.last, about
        store.flush()
        store.close()
    finish_capture(to)


def _divided(metadata: dict[str, Any], x: Tensor, holder: Holder) -> tuple[About, Tensor]:
    """A rank's metadata and values; block scales must be those of complete blocks."""
    module, tensor, rank = metadata["module"], metadata["tensor"], holder.place
    source = source_of(tensor)
    own = local(module, source, x, holder.layout, rank).contiguous()
    part = holder.part(module, tensor, tuple(own.shape))
    world_rank = next(r for r, place in holder.layout.places() if place == rank)
    more = holder.metadata(module, part) | {"rank": world_rank, "shape": list(own.shape)}
    of_floats = own.is_floating_point() and not tensor.endswith("_scale")
    return About.of(metadata | more | ({"statistics": statistics(own)} if of_floats else {})), own
