"""`quantexp doctor`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import quantexp.compiled
from quantexp.cli import doctor
from quantexp.cli.doctor import Check, checks, record, show
from quantexp.cli.main import main
from quantexp.compiled import Compiled
from quantexp.formats.certificate import Standing, State


def test_this_machine_can_run(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / "cache"))
    by_name = {check.name: check for check in checks()}
    assert list(by_name) == [
        "quantexp",
        "torch",
        "device",
        "numerics",
        "compiled code",
        "CPU products",
        "transformer-engine",
        "megatron-core",
        "SLURM",
        "memory",
        "configuration",
        "cache",
        "disk",
    ]
    for name in ("quantexp", "torch", "device", "megatron-core", "configuration", "cache"):
        assert by_name[name].ok, by_name[name]
    assert by_name["cache"].result == str(in_tmp / "cache" / "quantexp")
    assert by_name["numerics"] == Check("numerics", None, "not verified: run quantexp verify")


@pytest.mark.parametrize(("state", "ok"), [("verified", True), ("failed", False)])
def test_numerics_line_is_the_standing_of_the_certificate(
    state: str, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = Standing(State(state), "in words")
    monkeypatch.setattr("quantexp.formats.certificate.standing", lambda *_: verified)
    assert doctor._numerics() == Check("numerics", ok, "in words")


def test_cache_that_cannot_be_written_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check = doctor._cache()
    assert check.ok is False
    assert check.result.endswith("set paths.cache=FOLDER")


def test_memory_of_the_quick_test_is_that_of_the_readme() -> None:
    """0.15 GB: products through fp32, without AVX-512, take 0.04 GB more; both numbers are rounded."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (said,) = re.findall(r"([\d.]+) GB of memory", readme)
    assert doctor.quick_test_gb()["llama32-1b"] == pytest.approx(float(said), abs=0.15)


@pytest.mark.parametrize(
    ("free", "ok", "end"),
    [
        (64e9, None, " GB with llama31-8b"),
        (4e9, None, "; too little for deepseek2_lite or llama31-8b"),
        (0.1e9, False, "; too little for tiny, small, llama32-1b, deepseek2_lite or llama31-8b"),
    ],
)
def test_memory_fails_where_no_quick_test_fits(
    free: float, ok: bool | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=free, total=64e9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor, "host_memory_gb", lambda: 64.0)
    check = doctor._memory()
    assert (check.name, check.ok) == ("memory", ok)
    assert check.result.startswith(f"{free / 1e9:.1f} GB free; training=fast takes ")
    assert check.result.endswith(end)


def test_missing_torch_is_reported_and_stops_no_other_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor._torch().ok is False
    assert "pip install" in doctor._torch().result
    assert doctor._device() == Check("device", None, "not looked at: torch cannot be imported")
    assert doctor._numerics().result == "not looked at: torch cannot be imported"
    assert doctor._products().result == "not looked at: torch cannot be imported"


def test_one_failed_check_fails_the_whole() -> None:
    good, taste, bad = Check("a", True, ""), Check("b", None, ""), Check("c", False, "")
    assert record([good, taste])["ok"] is True
    assert record([good, taste, bad]) == {
        "ok": False,
        "checks": [
            {"name": "a", "ok": True, "result": ""},
            {"name": "b", "ok": None, "result": ""},
            {"name": "c", "ok": False, "result": ""},
        ],
    }


def test_checks_are_printed_with_their_marks(capsys: pytest.CaptureFixture[str]) -> None:
    show([Check("a", True, "[fine]"), Check("b", False, "broken")], Console())
    assert capsys.readouterr().out.split() == ["ok", "a", "[fine]", "no", "b", "broken"]


def test_words_and_paths_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/" + "folder/" * 12
    results = [Check("CPU products", True, "bf16 natively, " * 5), Check("cache", False, folder)]
    show(results, Console(width=80))
    assert capsys.readouterr().out.splitlines() == [
        "ok  CPU products  bf16 natively, bf16 natively, bf16 natively, bf16 natively,",
        "                  bf16 natively,",
        "no  cache",
        folder,
    ]


def test_without_a_compiler_the_slower_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTEXP_COMPILE", "0")
    words = (
        "not compiled, as QUANTEXP_COMPILE=0 says; tensors are quantised by torch, many times slower; "
        "statistics are computed by torch, several times slower"
    )
    assert doctor._compiled() == Check("compiled code", None, words)


def test_one_file_that_does_not_compile_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(source: Path) -> Compiled:
        return Compiled(None, "it is broken") if source.name == "statistics.c" else real(source)

    real = quantexp.compiled.compiled
    monkeypatch.setattr(quantexp.compiled, "compiled", compiled)
    words = "it is broken; statistics are computed by torch, several times slower"
    assert doctor._compiled() == Check("compiled code", None, words)


def test_the_compiled_code_and_its_vectors_are_named() -> None:
    check = doctor._compiled()
    assert check.ok
    vectors = "(AVX-512|AVX2|vectors of 128 bits)"
    assert re.search(
        rf": quantisation \({vectors}, torch's threads\), statistics$",
        check.result,
    )


@pytest.mark.parametrize(
    ("native", "words"),
    [
        (("bf16", "fp16"), "bf16 torch's kernel, ~; fp16 torch's kernel, ~"),
        (("bf16",), "bf16 torch's kernel, ~; fp16 through fp32, ~"),
        ((), "bf16 through fp32, ~; fp16 through fp32, ~"),
    ],
)
def test_the_kernels_of_16_bit_products_are_listed_with_their_speed(
    native: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quantexp.runs.device.multiplies_natively", lambda p: p.value in native)
    monkeypatch.setattr("quantexp.launch.machine_rates.product_gflop_per_s", lambda *_: 95.24)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = doctor._products()
    assert check.ok
    assert check.result == words.replace("~", "95.2 GFLOP/s")


@pytest.mark.parametrize(
    ("obstacle", "how"),
    [(None, "Triton"), ("no Triton", "torch, many times slower: no Triton")],
)
def test_a_gpu_is_listed_with_its_quantisation_kernels(
    obstacle: str | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    h200 = SimpleNamespace(name="NVIDIA H200", total_memory=141e9, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: h200)
    monkeypatch.setattr("quantexp.formats.kernels.gpu.obstacle", lambda device: obstacle)
    words = "2 x NVIDIA H200, 141 GB, compute capability 9.0; tensors are quantised, and attention in tiles multiplied,"
    assert doctor._device() == Check("device", True, f"{words} by {how}")


def test_doctor_takes_no_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "training=fast"])
    assert ended.value.code == 2
    assert "doctor takes no overrides, got training=fast" in capsys.readouterr().err


def test_doctor_answers_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(["doctor", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert code == (0 if content["ok"] else 1)
    assert "torch" in [check["name"] for check in content["checks"]]
