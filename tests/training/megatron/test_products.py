"""The products that a session computes through fp32, and their record in a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantexp.quant.products import go_through_fp32
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.schema import Experiment, Precision
from quantexp.training.megatron import session as sessions
from quantexp.training.megatron.session import products_of, session

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]
#: Limits oneDNN and torch to AVX2.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a processor without 16-bit products in torch."""
    for user in ("training.megatron.session", "launch.identity"):
        monkeypatch.setattr(f"quantexp.{user}.multiplies_natively", lambda _: False)


def record_routes(experiment: Experiment) -> tuple[list[torch.dtype], str | None]:
    """The dtypes that go through fp32 in a session, and the name that the run records."""
    with session(experiment.training) as device:
        dtypes = [x for x in (torch.bfloat16, torch.float16) if go_through_fp32(x)]
        products = products_of(experiment.training, device)
    assert not any(go_through_fp32(x) for x in (torch.bfloat16, torch.float16))
    return dtypes, products


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("precision", "dtypes", "products"),
    [
        ("bf16", [torch.bfloat16], "fp32"),
        ("fp16", [torch.float16], "fp32"),
        ("fp32", [], None),
    ],
)
def test_without_kernels_the_working_dtype_goes_through_fp32_while_the_session_lasts(
    tiny: Tiny, precision: str, dtypes: list[torch.dtype], products: str | None
) -> None:
    assert record_routes(tiny(f"training.precision={precision}")) == (dtypes, products)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_kernels_a_session_changes_no_product(
    tiny: Tiny, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "multiplies_natively", lambda _: True)
    assert record_routes(tiny(f"training.precision={precision}")) == ([], "native")


def test_one_rank_without_kernels_is_enough_for_all(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "multiplies_natively", lambda _: True)
    monkeypatch.setattr(sessions, "gather", lambda own: [own, False])
    assert record_routes(tiny()) == ([torch.bfloat16], "fp32")


def test_on_a_gpu_nothing_goes_through_fp32(tiny: Tiny) -> None:
    training = tiny().training
    assert training.precision is Precision.bf16
    gpu = torch.device("cuda", 0)
    assert sessions._dtypes_without_kernels(training, gpu) == []
    assert products_of(training, gpu) is None


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    "overrides",
    [
        ["training.attention=fused", "training.precision=fp16", "training.recompute=full"],
        ["training.attention=tiled", "quant=more/FA_full_mxfp8"],
        ["model=deepseek2_lite"],
    ],
    ids=str,
)
def test_run_through_fp32_is_proved_and_recorded(
    run_tiny: RunTiny, tiny_models: dict[str, list[str]], overrides: list[str]
) -> None:
    if "model=deepseek2_lite" in overrides:
        overrides = tiny_models["deepseek2_lite"]
    run = run_tiny("quant=FA_linear_mxfp8", "capture=off", *overrides)
    check_proved(run)


def check_proved(run: RunDir) -> None:
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.COMPLETED, status.reason
    proof = json.loads(run.precision.read_text())
    assert proof["proved"]
    assert any(e["status"] == "engaged" and e["quantised_calls"] for e in proof["entries"])
    provenance = json.loads(run.provenance.read_text())
    assert provenance["identity"]["products"] == "fp32"
    assert provenance["ran"]["products"] == "fp32"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
def test_command_limited_to_avx2_is_proved_and_recorded(
    tiny_words: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "quantexp", *tiny_words, "quant=FA_linear_mxfp8"]
    command += ["capture=off", f"paths.root={tmp_path}"]
    process = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **AVX2}
    )
    assert process.returncode == 0, process.stderr
    (folder,) = tmp_path.glob("llama*")
    check_proved(RunDir(folder))
