"""Files of torch.save whose pickle lies about the bytes beside it."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture.store.values import load_values
from quantexp.errors import CaptureError, DataError
from quantexp.extras.megatron_lm.checkpoint_reader import read_weights
from quantexp.model.torch_file import load_torch_file


class Storage:
    """Stands for the storage "0", of so many elements as the pickle says."""

    def __init__(self, num_elements: int) -> None:
        self.num_elements = num_elements


class Rebuilt:
    """Unpickled as a tensor of that storage."""

    def __init__(self, storage: Storage, offset: int, shape: tuple[int, ...]) -> None:
        hooks: OrderedDict[str, object] = OrderedDict()
        self.arguments = (storage, offset, shape, torch.empty(shape).stride(), False, hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        if isinstance(value, Storage):
            return "storage", torch.FloatStorage, "0", "cpu", value.num_elements
        return None


def forge(
    path: Path, said: int, shape: tuple[int, ...], offset: int = 0, others: tuple[int, ...] = ()
) -> Path:
    """A file with four float32, whose pickle has a storage of `said` elements and a tensor of this shape in it.

    Storages of so many elements as `others` say follow in the file, and the pickle does not name them.
    """
    rest = {str(number): torch.zeros(number) for number in others}
    torch.save({"tensor": torch.arange(4.0), **rest}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump({"tensor": Rebuilt(Storage(said), offset, shape)})
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            is_pickle = name.endswith("/data.pkl")
            archive.writestr(name, stream.getvalue() if is_pickle else content)
    return path


def test_storages_of_equal_sizes_are_read(tmp_path: Path) -> None:
    tensors = {str(i): torch.full((4, 4), float(i)) for i in range(5)}
    torch.save(tensors, tmp_path / "x.pt")
    content = load_torch_file(tmp_path / "x.pt", weights_only=True)
    assert [content[name].unique().tolist() for name in tensors] == [[i] for i in range(5)]


def test_a_whole_storage_is_read(tmp_path: Path) -> None:
    content = load_torch_file(forge(tmp_path / "x.pt", 4, (2, 2)), weights_only=True)
    assert content["tensor"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("said", "shape", "offset", "others"),
    [
        (8, (8,), 0, ()),
        (1 << 20, (1 << 20,), 0, ()),
        (4, (8,), 0, ()),
        (4, (4,), 2, ()),
        (8, (4,), 4, ()),
        (64, (64,), 0, (64,)),
        (64, (64,), 0, (32, 64, 64)),
    ],
    ids=[
        "into the next member",
        "beyond the file",
        "shape",
        "offset",
        "offset in the next member",
        "the size of another member",
        "the size of other members",
    ],
)
def test_a_tensor_beyond_its_stored_bytes_is_refused_by_every_reader(
    tmp_path: Path, said: int, shape: tuple[int, ...], offset: int, others: tuple[int, ...]
) -> None:
    rank = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    rank.parent.mkdir()
    forge(rank, said, shape, offset, others)
    with pytest.raises(CaptureError, match=r"rng\.pt is refused: it is no file of captured values"):
        load_values(rank, {})
    with pytest.raises(DataError, match=r"rng\.pt cannot be read: [^\n]+$"):
        read_weights(tmp_path)
