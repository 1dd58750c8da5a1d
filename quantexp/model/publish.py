"""Writes a model's weights in the published layout: safetensors files of limited size, an index, config.json.

One published tensor is in memory at a time. The file names are those of transformers: `model.safetensors`, or
`model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quantexp.model.checkpoint_hashes import FileHash, write_hashed
from quantexp.model.huggingface import CONFIG, GENERATION, INDEX, SINGLE
from quantexp.model.huggingface.configuration import config_json
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.token_roles import TokenRoles
from quantexp.model.safetensors import described
from quantexp.model.saved_tensors import SavedTensors
from quantexp.schema import ModelConfig

if TYPE_CHECKING:
    import torch

#: Maximum bytes of one file; a larger tensor gets its own file.
SHARD_BYTES = 5_000_000_000

Shapes = Mapping[str, tuple[int, ...]]


class PublishedTensors(Protocol):
    """The published tensors of a model, from whatever holds its parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """That of all of them."""

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""


def write_published(
    tensors: PublishedTensors,
    model: ModelConfig,
    folder: Path,
    shown: Path | None = None,
    roles: TokenRoles | None = None,
) -> dict[str, FileHash]:
    """Write a model's published tensors, their index and config.json into a folder.

    Args:
        tensors: those of a model built for `model`.
        model: its configuration.
        folder: has no such files.
        shown: the checkpoint's folder in messages; None means `folder`.
        roles: what the configuration says of tokens; None means nothing.

    Returns:
        The hashes of the weights' files, by their names.

    Raises:
        OSError: a file cannot be written.
        RunError: a weight is NaN or Inf in the working dtype.
        DataError: the shards lack elements.
    """
    shapes, dtype = published(mapping(model)), tensors.dtype
    shards = _shards(shapes, dtype.itemsize, SHARD_BYTES)
    files = dict(zip(_names(len(shards)), shards, strict=True))
    hashes = {
        file: write_hashed(
            folder / file,
            {name: (_name(dtype), shape) for name, shape in own.items()},
            map(tensors.tensor, own),
            {"format": "pt"},
            shown or folder,
        )
        for file, own in files.items()
    }
    if len(files) > 1:
        _write_index(folder / INDEX, files, dtype.itemsize)
    write_config(model, _name(dtype), folder, roles)
    return hashes


def write_padding(
    tensors: SavedTensors, model: ModelConfig, file: Path, shown: Path | None = None
) -> dict[str, FileHash]:
    """Write the padding rows of the vocabulary by their parameters' names; no file if there are none.

    Arguments, result and errors are those of `write_published`.
    """
    rows = {each.name: tensors.tensor(each.name) for each in mapping(model) if each.padding}
    if not rows:
        return {}
    return {file.name: write_hashed(file, described(rows), rows.values(), {}, shown or file.parent)}


def write_config(
    model: ModelConfig, dtype: str, folder: Path, roles: TokenRoles | None = None
) -> None:
    """Write config.json, and generation_config.json if there is one; `dtype` is torch's name of the weights' dtype.

    Raises:
        OSError: one cannot be written.
    """
    roles = roles or TokenRoles()
    content = config_json(model, dtype) | roles.entries
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    if roles.generation is not None:
        (folder / GENERATION).write_bytes(roles.generation)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _write_index(
    file: Path, files: Mapping[str, Mapping[str, tuple[int, ...]]], itemsize: int
) -> None:
    sizes = (math.prod(shape) * itemsize for own in files.values() for shape in own.values())
    weight_map = {tensor: name for name, own in files.items() for tensor in own}
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    file.write_text(json.dumps(content, indent=2) + "\n")
