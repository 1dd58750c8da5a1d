"""`quantexp verify` as typed by a user."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from quantexp.cli.main import main
from quantexp.extras.verify import kernels, suite
from quantexp.extras.verify import verification as verb
from quantexp.extras.verify.exact import KINDS
from quantexp.formats import quantise
from quantexp.formats.certificate import State, folder_in, standing
from quantexp.formats.definitions.files import shipped_formats

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / "cache"))
    monkeypatch.setattr(suite, "devices", lambda: ("cpu",))
    monkeypatch.setattr(verb, "devices", lambda: ("cpu",))
    return in_tmp / "cache" / "quantexp"


@pytest.fixture
def only_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verified subject is bf16 only, which takes half a second."""
    monkeypatch.setattr(verb, "SUBJECTS", ("bf16",))
    monkeypatch.setattr(verb, "shipped_formats", dict)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of each tensor is off by one bit."""

    def off(x: Tensor, fmt: str, **options: Any) -> Tensor:
        y = quantise(x, fmt, **options).contiguous()
        y.view(-1).view(torch.int32 if y.dtype == torch.float32 else torch.int16)[7] ^= 1
        return y

    wrong = dataclasses.replace(kernels.KERNELS[0], quantise=off)
    monkeypatch.setattr(kernels, "KERNELS", (wrong,))


@pytest.mark.usefixtures("only_bf16")
def test_the_table_the_oracles_and_the_certificate_are_shown(capsys: Captured, cache: Path) -> None:
    assert main(["verify"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    heading, *rows = (line for line in captured.out.splitlines() if line[:1] in "┃│")
    assert heading.split()[1::2] == ["format", "kernel", "oracle", "cases", "mismatches"]
    assert [row.split("│")[1:-1][2].strip() for row in rows] == [
        "rational gold",
        "exact gold",
        "ml_dtypes",
        "torch",
    ]
    assert "oracles: exact gold, ml_dtypes " in captured.out
    (file,) = folder_in(cache).iterdir()
    assert f"certificate: {file}" in captured.out
    assert standing(cache, "cpu").state is State.VERIFIED


@pytest.mark.usefixtures("only_bf16", "faulty")
def test_a_faulty_kernel_is_shown_with_its_bits_and_ends_with_1(
    capsys: Captured, cache: Path
) -> None:
    assert main(["verify"]) == 1
    captured = capsys.readouterr()
    assert "bf16, reference (cpu), quantise of 0x" in captured.out
    assert "exact gold says 0x" in captured.out
    assert captured.err.startswith("quantexp: verify: ")
    assert captured.err.endswith(" values are not what they should be\n")
    assert standing(cache, "cpu").state is State.FAILED


@pytest.mark.usefixtures("only_bf16", "faulty")
def test_json_has_every_row_with_its_mismatches(capsys: Captured) -> None:
    assert main(["verify", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["passed"] is False
    assert content["mismatches"] == sum(row["mismatches"] for row in content["rows"]) > 0
    (gold,) = (r for r in content["rows"] if r["oracle"] == "exact gold")
    assert {"what", "request", "at", "input", "expected", "got"} == set(gold["examples"][0])
    assert set(content["oracles"]) >= {"ml_dtypes", "gfloat", "en_dtypes", "torchao", "torch"}
    assert len(content["certificates"]) == 1


def test_a_part_makes_no_certificate(capsys: Captured, cache: Path) -> None:
    assert main(["verify", "--formats", "hadamard,bf16", "--device", "cpu"]) == 0
    assert "no certificate: only bf16, hadamard" in capsys.readouterr().out
    assert not folder_in(cache).exists()


@pytest.mark.usefixtures("faulty")
def test_a_part_that_fails_makes_one(cache: Path) -> None:
    assert main(["verify", "--formats", "bf16"]) == 1
    assert standing(cache, "cpu").state is State.FAILED


@pytest.mark.usefixtures("only_bf16")
def test_an_absent_oracle_is_named_and_not_counted(
    capsys: Captured, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.delitem(
        sys.modules, "quantexp.extras.verify.oracles.ml_dtypes_oracle", raising=False
    )
    assert main(["verify"]) == 0
    out = capsys.readouterr().out
    assert "absent, not counted: ml_dtypes: ml_dtypes cannot be imported" in out
    assert "│ ml_dtypes" not in out
    assert standing(cache, "cpu").words.endswith("; absent: ml_dtypes")


@pytest.mark.usefixtures("only_bf16")
def test_the_cache_may_be_elsewhere(in_tmp: Path) -> None:
    assert main(["verify", f"paths.cache={in_tmp / 'mine'}"]) == 0
    assert standing(in_tmp / "mine", "cpu").state is State.VERIFIED


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--formats", "bf16,fp7"],
            "quantexp: --formats: unknown number format 'fp7': must be one of ",
        ),
        (
            ["--device", "cuda"],
            "quantexp: this machine has no CUDA device: leave --device out, or give cpu\n",
        ),
    ],
)
def test_names_that_cannot_be_verified_are_refused(
    capsys: Captured, words: list[str], says: str
) -> None:
    assert main(["verify", *words]) == 1
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.parametrize("words", [["training=fast"], ["--device", "tpu"]])
def test_overrides_and_other_devices_are_misuse(capsys: Captured, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *words])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert (
        "verify takes files of formats (NAME.yaml) and paths.cache=FOLDER alone" in err
        or "--device must be one of cpu, cuda, got" in err
    )


def test_short_names_and_any_order_choose_formats() -> None:
    assert verb.chosen_subjects("hadamard,mxfp4,mxfp8") == ["mxfp8_e4m3", "mxfp4_e2m1", "hadamard"]
    assert verb.chosen_subjects(None) == [*KINDS, "hadamard", *shipped_formats()]
    own = [Path("mine/own.yaml")]
    assert verb.chosen_subjects(None, own) == ["own"]
    assert verb.chosen_subjects("mxint8,mxfp8", own) == ["mxfp8_e4m3", "mxint8", "own"]


def test_a_terminal_has_a_line_while_it_works(cache: Path) -> None:
    console = Console(force_terminal=True, width=120, record=True, file=sys.stderr)
    verb.run_verify("bf16", "cpu", cache, console)
    assert "values, 0 differ" in console.export_text()


@pytest.mark.slow
def test_the_whole_suite_passes_on_this_machine(capsys: Captured, cache: Path) -> None:
    assert main(["verify", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["cases"] > 250_000_000
    assert {row["format"] for row in content["rows"]} == {
        *KINDS,
        "hadamard",
        *shipped_formats(),
    }
    assert standing(cache, "cpu").state is State.VERIFIED
