from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from quantexp.analysis.numerics.gather import gather
from quantexp.capture.reader import CapturedTensor
from tests.analysis.captures import HIF8, MX4, Capture

from .desks import MemoryDesk, add_run, source_of


@pytest.mark.slow
def test_one_tensor_at_a_time_is_in_memory(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(capture, layers=1, settings=MX4)
    load = CapturedTensor.torch
    loaded: list[weakref.ref[torch.Tensor]] = []

    def counted(entry: CapturedTensor) -> torch.Tensor:
        gc.collect()
        assert [one for one in loaded if one() is not None] == []
        x = load(entry)
        loaded.append(weakref.ref(x))
        return x

    monkeypatch.setattr(CapturedTensor, "torch", counted)
    (run,) = gather([source_of(capture)], MemoryDesk(tmp_path))
    assert len(loaded) == len(run.tensors) == 9


def test_a_run_with_a_format_is_judged_under_it_alone_and_one_without_under_the_usual_ones(
    tmp_path: Path,
) -> None:
    quantised, plain = Capture(tmp_path / "a"), Capture(tmp_path / "b")
    add_run(quantised, layers=1, settings=HIF8)
    add_run(plain, layers=1)
    runs = gather([source_of(quantised), source_of(plain)], MemoryDesk(tmp_path))
    formats = [{o.format for one in run.tensors for o in one.operands} for run in runs]
    assert formats == [
        {"hifp8 current"},
        {"mxfp8_e4m3 rceil", "mxfp4_e2m1 floor", "hifp8 current"},
    ]


def test_the_scheme_comes_from_the_run_or_from_its_tensors(
    capture: Capture, tmp_path: Path
) -> None:
    add_run(capture, layers=1, settings=MX4, quant_type="mxfp4")
    named, bare = (source_of(capture, scheme) for scheme in ("linear_mxfp4", None))
    runs = gather([named, bare], MemoryDesk(tmp_path))
    assert [run.scheme for run in runs] == ["linear_mxfp4", "mxfp4"]
