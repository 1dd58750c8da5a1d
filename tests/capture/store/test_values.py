"""Files of captured tensors that are missing, damaged, or contain something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture.reader import open_capture
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind
from tests.analysis.captures import Capture


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    return Capture(tmp_path / "run")


def load(capture: Capture) -> torch.Tensor:
    return open_capture(capture.dir)[0].torch()


def test_a_tensor_comes_back_bit_for_bit(capture: Capture) -> None:
    x = torch.randn(5, 7).to(torch.bfloat16)
    capture.add(x, "input")
    assert torch.equal(load(capture), x)


def test_torchs_old_file_layout_is_read(capture: Capture) -> None:
    line = capture.add(torch.ones(3), "input")
    payload = {"tensor": torch.arange(3.0), "metadata": {}}
    torch.save(payload, capture.dir / line["file"], _use_new_zipfile_serialization=False)
    assert load(capture).tolist() == [0, 1, 2]


def test_loading_a_missing_file_names_it(capture: Capture) -> None:
    (capture.dir / capture.add(torch.ones(2), "input")["file"]).unlink()
    with pytest.raises(CaptureError, match=r"mxfp8_input.pt is missing although it is listed"):
        load(capture)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 torn archive"])
def test_loading_a_corrupt_file_names_it(capture: Capture, content: bytes) -> None:
    line = capture.add(torch.ones(2), "input")
    (capture.dir / line["file"]).write_bytes(content)
    with pytest.raises(CaptureError, match=r"mxfp8_input.pt is refused: .* is damaged, or"):
        load(capture)


def test_loading_half_a_file_names_it(capture: Capture) -> None:
    path = capture.dir / capture.add(torch.ones(2000), "input")["file"]
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CaptureError, match="is damaged"):
        load(capture)


@pytest.mark.parametrize("payload", [{"metadata": {}}, [1, 2], {"tensor": 3}])
def test_loading_a_file_without_a_tensor_is_refused(capture: Capture, payload: object) -> None:
    line = capture.add(torch.ones(2), "input")
    torch.save(payload, capture.dir / line["file"])
    with pytest.raises(CaptureError, match=r"mxfp8_input.pt holds no tensor; was it captured"):
        load(capture)


@pytest.mark.parametrize("is_archive", [True, False])
def test_fewer_stored_bytes_than_the_shape_takes_are_refused_in_one_line(
    capture: Capture, is_archive: bool
) -> None:
    line = capture.add(torch.ones(2), "input")
    payload = {"tensor": torch.ones(1).expand(1 << 40, 8), "metadata": {}}
    torch.save(payload, capture.dir / line["file"], _use_new_zipfile_serialization=is_archive)
    with pytest.raises(CaptureError) as error:
        load(capture)
    words = (
        "is refused: its shape [1099511627776, 8] takes 35,184,372,088,832 bytes, and 4 are stored"
    )
    assert str(error.value).endswith(f"mxfp8_input.pt {words}")


def test_a_stored_view_and_a_lazy_sign_are_read_as_their_values(capture: Capture) -> None:
    line = capture.add(torch.ones(2), "input")
    for values in (torch.arange(8.0)[1::2], torch._neg_view(torch.arange(4.0))):
        torch.save({"tensor": values, "metadata": {}}, capture.dir / line["file"])
        assert load(capture).view(-1).tolist() == values.tolist()


@pytest.mark.parametrize("file", ["../../x.pt", "/x.pt", "a/../../x.pt"])
def test_a_manifest_cannot_name_a_file_elsewhere(capture: Capture, file: str) -> None:
    capture.add(torch.ones(2), "input")["file"] = file
    capture.write()
    with pytest.raises(CaptureError, match=f"names {file}, which is outside the folder"):
        load(capture)


def test_a_name_that_no_file_can_have_is_refused(capture: Capture) -> None:
    capture.add(torch.ones(2), "input", file="a\0b")
    with pytest.raises(CaptureError, match=r"jsonl names 'a\\x00b', which is no file's name"):
        load(capture)


def test_tensors_of_a_shard_are_distinguished_and_read(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path, kind=StoreKind.safetensors)
    line: dict[str, Any] = dict.fromkeys(
        ("module", "layer_type", "phase", "component", "quant_type"), ""
    )
    line |= {"layer": 0, "iteration": 1, "micro_batch": 0, "rank": 0, "formats": {}}
    for i in range(3):
        x = torch.full((2,), float(i))
        metadata = {**line, "operation": "forward", "tensor": str(i), "shape": [2]}
        store.add(f"bf16/{i}.pt", x, About.of(metadata | {"dtype": "float32"}))
    assert store.last is not None
    store.refer(store.last, About.of(metadata | {"operation": "backward", "dtype": "float32"}))
    store.close()
    stored = open_capture(tmp_path).with_values()
    assert [entry.metadata["key"] for entry in stored] == ["bf16/0", "bf16/1", "bf16/2"]
    assert [entry.torch().tolist() for entry in stored] == [[i, i] for i in range(3)]
