"""Writes a model's weights in the published layout: safetensors files of limited size, an index, config.json.

One published tensor is in memory at a time. The file names are those of transformers: `model.safetensors`, or
`model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.folders import beside, sync
from quantexp.model.checkpoint_hashes import FileHash, record_hashes
from quantexp.model.checkpoints import iteration_of
from quantexp.model.huggingface.configuration import config_json
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.weights import CONFIG, INDEX, SINGLE
from quantexp.model.safetensors import content_of, dtype_name, entry, framed
from quantexp.schema import ModelConfig

if TYPE_CHECKING:
    import torch

    from quantexp.training.megatron.gathering import WholeTensors

#: Maximum bytes of one file; a larger tensor gets its own file.
SHARD_BYTES = 5_000_000_000

Shapes = Mapping[str, tuple[int, ...]]


def save_published(
    whole: WholeTensors,
    model: ModelConfig,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    extra: Mapping[str, Callable[[Path], object]] | None = None,
    state: Callable[[], Mapping[str, FileHash]] | None = None,
) -> None:
    """Write a model into a new folder, under a temporary name that is renamed at the end, on the disk before and after.

    After a power failure the folder is whole or not there. After an error nothing is left of it.

    Args:
        whole: the tensors of a model built for `model`; with several ranks, call inside `lead_or_serve`.
        model: its configuration.
        folder: must not exist.
        shard_bytes: maximum bytes of a file.
        extra: further files of the folder, each with the function that writes it.
        state: writes the training state into the temporary folder, and returns the hashes of the ranks' files by name.

    Raises:
        OSError, RuntimeError: the folder cannot be written; torch raises the latter (see `quantexp.runs.disk.writing`).
        RunError: a weight is NaN or Inf; there is no folder then.
    """
    part = beside(folder)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        _write_all(whole, model, part, shard_bytes, extra or {})
        hashes = {} if state is None else state()
        record_hashes(part, iteration_of(folder), hashes)
        for file in (*part.iterdir(), part):
            sync(file)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync(folder.parent)


def _write_all(
    whole: WholeTensors,
    model: ModelConfig,
    part: Path,
    shard_bytes: int,
    extra: Mapping[str, Callable[[Path], object]],
) -> None:
    from quantexp.training.megatron.finite import require_finite

    shapes, dtype = published(mapping(model)), whole.dtype
    tensors = require_finite(((name, whole.tensor(name)) for name in shapes), part.with_suffix(""))
    shards = _shards(shapes, dtype.itemsize, shard_bytes)
    names = _names(len(shards))
    for name, shapes in zip(names, shards, strict=True):
        _write(part / name, shapes, str(dtype).removeprefix("torch."), dtype.itemsize, tensors)
    if len(names) > 1:
        _write_index(part / INDEX, names, shards, dtype.itemsize)
    config = config_json(model, str(dtype).removeprefix("torch."))
    (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for name, write in extra.items():
        write(part / name)


def _shards(shapes: Shapes, itemsize: int, max_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of each file, in order."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    num_bytes = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if shards[-1] and num_bytes + size > max_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = shape
        num_bytes += size
    return shards


def _names(number: int) -> list[str]:
    if number == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]


def _write(
    file: Path,
    shapes: Shapes,
    dtype: str,
    itemsize: int,
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write the file with the next tensors of the iterator, whose order is that of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * itemsize
        header[name] = entry(dtype, list(shape), start, end)
    with file.open("wb") as stream:
        stream.write(framed(header))
        for expected in shapes:
            name, tensor = next(tensors)
            assert name == expected
            assert dtype_name(tensor) == dtype
            stream.write(content_of(tensor))


def _write_index(file: Path, names: list[str], shards: list[Any], itemsize: int) -> None:
    total = sum(math.prod(shape) * itemsize for shapes in shards for shape in shapes.values())
    weight_map = {
        tensor: name for name, shapes in zip(names, shards, strict=True) for tensor in shapes
    }
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    file.write_text(json.dumps(content, indent=2) + "\n")
