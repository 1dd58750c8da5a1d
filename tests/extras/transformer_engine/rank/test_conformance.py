"""`verify --backend transformer_engine`: Transformer Engine's quantizers, with kernels written in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quantexp.errors import VerifyError
from quantexp.extras.transformer_engine.conformance import (
    Outcome,
    conform,
    run_conformance,
    subjects,
)
from quantexp.extras.transformer_engine.scheme.operands import held
from tests.extras.transformer_engine.rank.child import B200, H100, Child


@cache
def outcome(capability: tuple[int, int], fault: str = "") -> Outcome:
    """The comparison on a machine of this capability, which the caller pretends."""
    from tests.extras.transformer_engine.rank import kernels

    kernels.install()
    import transformer_engine_torch as native

    if fault:
        native.quantize = lambda x, *rest: kernels.quantize(x * (1 + 2**-5), *rest)
    return conform(torch.device("cpu"))


def test_every_recipe_conforms_on_a_machine_that_runs_all(each_te: Child) -> None:
    result = each_te.run(outcome, B200)
    examples = [f"{row.recipe} {row.operand} {row.copy}: {row.example}" for row in result.rows]
    assert [each for each in examples if not each.endswith(": ")] == []
    assert len(result.rows) == 5 * 3 * 2
    assert result.absent == {}
    reasons = {"NaN", "Inf", "NVFP4", "zero block"} | (
        {"smallest"} if each_te.version < "2.13" else set()
    )
    assert {name for row in result.rows for name in row.expected} == reasons


def test_recipes_that_the_machine_cannot_run_are_absent_with_the_reason(te: Child) -> None:
    result = te.run(outcome, H100, capability=H100)
    mxfp8, nvfp4 = result.absent
    assert (mxfp8[:17], nvfp4[:17]) == ("MXFP8BlockScaling", "NVFP4BlockScaling")
    assert "10.0 or higher required for MXFP8" in result.absent[mxfp8]
    assert {row.recipe for row in result.rows} == {
        "Float8CurrentScaling(HYBRID, float32 scales)",
        "Float8CurrentScaling(HYBRID, powers of two)",
        "Float8BlockScaling(E4M3, w 128 x 128, powers of two)",
    }


def test_blocks_of_zeros_are_counted_as_one_h200_counted_them(te: Child) -> None:
    rows = te.run(outcome, H100, capability=H100).rows
    counts = {
        (row.operand, row.copy): dict(row.expected)
        for row in rows
        if row.recipe.startswith("Float8BlockScaling")
    }
    of_zeros = {"rowwise": {"zero block": 2}, "columnwise": {"zero block": 32}}
    assert counts == {
        **{(operand, copy): of_zeros[copy] for operand in "xg" for copy in of_zeros},
        **{("w", copy): {} for copy in of_zeros},
    }


def test_kernels_that_quantise_other_values_differ_in_every_row(te: Child) -> None:
    result = te.run(outcome, B200, "fault")
    assert all(row.mismatches for row in result.rows)
    assert result.rows[0].example.startswith("normal values in bfloat16: ")
    assert result.rows[0].example.endswith(" scales differ")
    assert result.mismatches == sum(row.mismatches for row in result.rows)


def test_the_formats_are_the_slots_of_the_recipes() -> None:
    for subject in subjects():
        for slot, wanted in subject.recipe.slots().items():
            assert held(subject.formats[slot.operand]) == wanted


def refusal() -> str:
    try:
        run_conformance()
    except VerifyError as error:
        return str(error)
    return "no refusal"


def test_without_a_gpu_it_is_refused(te: Child) -> None:
    message = "verify --backend transformer_engine quantises on a GPU, and this machine has none"
    assert te.run(refusal) == message


def test_without_transformer_engine_the_command_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('libcudnn is missing')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "quantexp", "verify", "--backend", "transformer_engine"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "quantexp: verify --backend transformer_engine needs Transformer Engine, which cannot be imported here "
        "(RuntimeError: libcudnn is missing): pip install 'quantexp[te]'\n"
    )


def printed(words: list[str], capability: tuple[int, int], fault: str = "") -> tuple[int, str, str]:
    """The command's exit code and output, with kernels in torch on a CPU."""
    import contextlib
    import io
    from unittest.mock import patch

    from quantexp.cli.main import main

    streams = io.StringIO(), io.StringIO()
    made = outcome(capability, fault)
    with (
        patch(
            "quantexp.extras.transformer_engine.conformance.run_conformance",
            lambda: made,
        ),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        code = main(["verify", "--backend", "transformer_engine", *words])
    return code, streams[0].getvalue(), streams[1].getvalue()


def test_the_table_names_what_differs_as_expected_and_why(te: Child) -> None:
    code, out, err = te.run(printed, [], H100, capability=H100)
    assert (code, err) == (0, "")
    assert "Float8BlockScaling" in out
    assert (
        "absent: MXFP8BlockScaling(HYBRID): Device compute capability 10.0 or higher required"
        in out
    )
    assert "Transformer Engine 2.11.0" in out
    _, out, _ = te.run(printed, [], B200)
    assert "NaN: its amax leaves NaN out" in out


def test_a_difference_ends_with_exit_code_1_and_an_example(te: Child) -> None:
    code, out, err = te.run(printed, [], B200, "fault")
    assert code == 1
    assert "MXFP8BlockScaling(HYBRID), x, rowwise: normal values in bfloat16: " in out
    assert "codes and scales are not what they should be" in err


def test_json_has_every_row(te: Child) -> None:
    code, out, _ = te.run(printed, ["--json"], H100, capability=H100)
    record: dict[str, Any] = json.loads(out)
    assert code == 0
    assert record["passed"] is True
    assert len(record["rows"]) == 18
    assert record["rows"][0]["format"] == "fp8_e4m3"
    assert [row["expected"] for row in record["rows"] if row["expected"]] == [
        *({"zero block": count} for _ in "xg" for count in (2, 32)),
    ]
    assert len(record["absent"]) == 2


def test_options_of_the_formats_are_refused(te: Child) -> None:
    command = [sys.executable, "-m", "quantexp", "verify", "--backend", "transformer_engine"]
    done = subprocess.run(
        [*command, "--formats", "mxfp8"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "--backend compares all recipes on the GPU, and takes --json alone" in done.stderr
