"""Reads the weights of a Megatron-LM checkpoint, in the formats torch_dist and torch, without Megatron.

torch_dist (Megatron-LM's default) has whole tensors, whatever the layout that wrote them; those of equal layers lie
together, layer by layer, and some norms and the experts have names of their own. torch has a file for each rank with a
part of the model (`rank_files`).

Arguments and metadata lie there as pickles. They are built from plain values and the few classes that describe tensors;
every other class that they name is replaced by one that does nothing, so that a file from a stranger runs no code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import pickle
import re
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from quantexp.errors import ConfigError, DataError
from quantexp.extras.megatron_lm.described import model_of
from quantexp.extras.megatron_lm.rank_files import first_file, joined
from quantexp.extras.megatron_lm.refused import require_known_model
from quantexp.model.huggingface.blocks import Source, sources
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.torch_file import load_torch_file
from quantexp.schema import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Names the iteration of the last checkpoint.
LATEST = "latest_checkpointed_iteration.txt"
#: The files that tell the formats.
METADATA, COMMON = ".metadata", "common.pt"
#: Ours -> theirs, in a torch_dist checkpoint: the names that Transformer Engine's fused layers have.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
#: A parameter of a routed expert, in a layer: before, the expert, after.
EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class LmWeights:
    """The published tensors of a checkpoint."""

    model: ModelConfig
    dtype: torch.dtype
    #: By Megatron's names, whole.
    parameters: Mapping[str, Tensor]
    sources: Mapping[str, Source]

    def tensor(self, name: str) -> Tensor:
        """A whole published tensor."""
        import torch

        source = self.sources[name]
        whole = torch.empty(source.shape, dtype=self.dtype)
        for block in source.blocks:
            rows = self.parameters[block.parameter][block.part_row : block.part_row + block.count]
            whole[block.first : block.first + block.count].copy_(rows)
        return whole


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a Megatron-LM checkpoint, or holds some."""
    is_one = (folder / METADATA).is_file() or first_file(folder).is_file()
    return is_one or (folder / LATEST).is_file()


def folder_of_iteration(folder: Path, iteration: str | None = None) -> Path:
    """The folder of one iteration: the folder itself, or in it that of `iteration`, or the last one.

    Raises:
        DataError: there is no such iteration.
    """
    if not (folder / LATEST).is_file():
        return folder
    word = (folder / LATEST).read_text().strip() if iteration is None else iteration
    named = folder / (f"iter_{int(word):07d}" if word.isdecimal() else word)
    if not named.is_dir():
        raise DataError(f"{folder} has no {named.name}")
    return named


def reader_of(folder: Path) -> Callable[[str | None], LmWeights] | None:
    """Reads the weights of an iteration (None: the last) of a checkpoint's folder; None if it is no such folder."""
    if not is_checkpoint(folder):
        return None
    return lambda iteration: read_weights(folder_of_iteration(folder, iteration))


def read_weights(folder: Path) -> LmWeights:
    """The weights of one iteration; the whole model is in memory.

    Raises:
        DataError: the folder is no checkpoint, or lacks a parameter.
        ConfigError: the model is in no family of quantexp's.
    """
    is_dist = (folder / METADATA).is_file()
    file = folder / COMMON if is_dist else first_file(folder)
    if is_dist and not file.is_file():
        file = folder / METADATA
        content = _common_state(folder)
    else:
        content = _load(file)
    model = _model(args := content.get("args"), file)
    names = {each.name: each.shape for each in mapping(model)}
    stored: Mapping[str, Tensor | None]
    if is_dist:
        stored = _whole_tensors(folder, names)
    else:
        stored = joined(
            names, model, args, lambda n: content if folder / n == file else _load(folder / n)
        )
    parameters: dict[str, Tensor] = {}
    for name, shape in names.items():
        found = stored.get(name)
        if found is None or tuple(found.shape) != shape:
            seen = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
            raise DataError(f"{folder}: {name} of shape {shape} {seen}")
        parameters[name] = found
    (dtype,) = {each.dtype for each in parameters.values()}
    return LmWeights(model, dtype, parameters, sources(model))


def _model(args: Any, file: Path) -> ModelConfig:
    if not isinstance(args, argparse.Namespace):
        raise DataError(f"{file} has no arguments of Megatron-LM, which say what model it is")
    try:
        require_known_model(args)
        return model_of(args)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _whole_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters of a torch_dist checkpoint, by their own names."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(folder)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    places = {name: place_of(name, stored) for name in names}
    if lost := [name for name, place in places.items() if place is None]:
        raise DataError(f"{folder}: {lost[0]} is missing")
    keys = {place[0] for place in places.values() if place is not None}
    wanted = {
        key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys
    }
    with no_word_of_one_process():
        load(wanted, storage_reader=reader, no_dist=True)
    return {name: wanted[place[0]][place[1]] for name, place in places.items() if place is not None}


@contextlib.contextmanager
def no_word_of_one_process() -> Iterator[None]:
    """Keep torch's load and save from warning of `no_dist=True`, which asks for one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _reader(folder: Path) -> Any:
    """torch's reader, whose metadata is built by `_Unpickler`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            try:
                with (folder / METADATA).open("rb") as stream:
                    return _Unpickler(stream).load()
            except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
                raise DataError(f"{folder / METADATA} cannot be read: {error}") from error

    return Reader(folder)


def split_name(name: str) -> tuple[int | None, str]:
    """The layer of a parameter, from 0, and its name in the layer; None and the name for one of no layer."""
    layer = _LAYER.fullmatch(name)
    return (None, name) if layer is None else (int(layer[1]), layer[2])


def place_of(name: str, stored: Mapping[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """The key of a parameter in a torch_dist checkpoint and its index there; None if it is missing."""
    index, own = split_name(name)
    if index is None:
        return (name, ()) if name in stored else None
    for rest in (own, FUSED.get(own, own)):
        expert = EXPERT.fullmatch(rest)
        inner: tuple[int, ...] = ()
        if expert is not None:
            rest, inner = f"{expert[1]}.experts.{expert[3]}", (int(expert[2]),)
        for key, place in (
            (f"decoder.layers.{rest}", (index, *inner)),
            (f"decoder.layers.{index}.{rest}", inner),
        ):
            if key in stored:
                return key, place
    return None


class _Inert:
    """Stands for any class of a pickle: keeps nothing and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


#: Modules whose classes describe tensors in the metadata of torch_dist.
_DESCRIBES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _Unpickler(pickle.Unpickler):
    """Builds plain values, tensors, their descriptions and argparse's namespace; `_Inert` for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        known: dict[tuple[str, str], Any] = {
            ("argparse", "Namespace"): argparse.Namespace,
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): torch.Size,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
        }
        if module in _DESCRIBES:
            described = getattr(importlib.import_module(module), name)
            is_plain = dataclasses.is_dataclass(described) or issubclass(described, Enum)
            return described if is_plain else _Inert
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return known.get((module, name), _Inert)


def _common_state(folder: Path) -> dict[str, Any]:
    """What Megatron-LM keeps in COMMON until 0.18, and from 0.19 on as one object among the tensors."""
    stored = _reader(folder).read_metadata().storage_data
    places = [stored[index] for index in stored if index.fqn.startswith("common_state/")]
    if not places:
        raise DataError(f"{folder} has no {COMMON}, and no common state in {METADATA}")
    place = places[0]
    file = folder / place.relative_path
    try:
        with file.open("rb") as stream, tempfile.NamedTemporaryFile() as copy:
            stream.seek(place.offset)
            copy.write(stream.read(place.length))
            copy.flush()
            return _load(Path(copy.name), file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _load(file: Path, of: Path | None = None) -> dict[str, Any]:
    """A file that torch has saved; `of` is the one that it is a part of."""
    inert = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="inert")
    try:
        content = load_torch_file(file, pickle_module=inert, weights_only=False)
    except (
        *(OSError, RuntimeError, ValueError, EOFError),
        *(pickle.UnpicklingError, zipfile.BadZipFile),
    ) as error:
        raise DataError(f"{of or file} cannot be read: {str(error).splitlines()[0]}") from error
    if of is not None and isinstance(content, list) and len(content) == 1:
        (content,) = content  # the shards of an object
    if not isinstance(content, dict):
        raise DataError(f"{of or file} is no checkpoint of Megatron-LM")
    return content
