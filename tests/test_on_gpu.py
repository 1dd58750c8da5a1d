"""The command that measures everything on a GPU: what it records, and that it runs where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_results

    return gpu_results.Results({"name": "H100", "torch": "2.11.0"})


def test_a_part_keeps_the_results_of_earlier_calls_and_repeats_what_failed(results: Any) -> None:
    good = {"case": "a", "seconds": 1.0, "rows": [{"ms": 2.0}]}
    results.add("steps", "failed", 3.0, [good, {"case": "b", "seconds": 1.0, "error": "boom"}])
    assert results.done("steps") == {"a"}
    results.add("steps", "done", 1.0, [{**good, "case": "b"}])
    assert results.done("steps") == {"a", "b"}
    assert results.done("attention") == set()


def test_tables_have_a_row_for_each_result_and_the_words_of_each_error(results: Any) -> None:
    rows = [{"ms": 2.00049, "way": "a|b"}, {"ms": 123456.0, "way": None}]
    failed = {"case": "y", "seconds": 1.0, "error": "Traceback\nKeyError: 1\n"}
    results.add("steps", "failed", 3.0, [{"case": "x", "seconds": 1.0, "rows": rows}, failed])
    text = results.markdown({"steps": "Steps", "attention": "Attention"})
    assert "| name | H100 |" in text
    table = "| measured | ms | way |\n|---|---|---|\n| x | 2 | a\\|b |\n| x | 123,456 |  |\n"
    assert f"## Steps\n\nfailed, 3 s\n\n{table}" in text
    assert "y failed:\n\n```text\nTraceback\nKeyError: 1\n```" in text
    assert "## Attention\n\nnot begun, 0 s" in text


def run(out: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / "on_gpu.py"), "--device", "cpu", *words]
    command += ["--only", "quantising", "--out", str(out)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    assert (out / "on_gpu.md").read_text().startswith("# Results")
    part: dict[str, Any] = json.loads((out / "on_gpu.json").read_text())["parts"]["quantising"]
    return part


def test_without_a_device_nothing_of_true_size_begins(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "on_gpu.py"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == "there is no CUDA device; --device cpu tries this program without one\n"
    assert not (tmp_path / "out").exists()


def test_what_a_failed_case_shows_is_kept_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_gpu
    from gpu_parts import CaseFailedError

    def differs() -> list[dict[str, Any]]:
        raise CaseFailedError("values differ", [{"mismatches": 3}])

    def breaks() -> list[dict[str, Any]]:
        raise KeyError("x")

    for name, case in (("differs", differs), ("breaks", breaks)):
        on_gpu._record(tmp_path / "lines", name, case)
    first, second = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (first["error"], first["rows"]) == ("values differ", [{"mismatches": 3}])
    assert "KeyError: 'x'" in second["error"]


def test_a_part_that_dies_at_once_or_in_its_last_case_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import contextlib
    from argparse import Namespace
    from time import monotonic

    import gpu_parts
    import gpu_results
    import on_gpu

    failed = json.dumps({"case": "last", "seconds": 0.1, "error": "boom"})
    for code, line in ((3, ""), (0, failed + "\n")):
        program = (
            f"import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({line!r}); sys.exit({code})"
        )

        @contextlib.contextmanager
        def process(part: Any, lines: Path, arguments: Any, program: str = program) -> Any:
            with subprocess.Popen([sys.executable, "-c", program, str(lines)]) as child:
                yield child

        monkeypatch.setattr(on_gpu, "_process", process)
        results = gpu_results.Results({})
        on_gpu._watch(gpu_parts.PARTS[0], results, monotonic() + 60, Namespace(out=tmp_path))
        assert results.parts["commands"]["status"] == "failed"


def test_without_transformer_engine_its_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_parts

    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((name, case),) = gpu_parts.transformer_engine(gpu_parts.Setting("cpu", tmp_path))
    (row,) = case()
    assert name == "absent"
    assert row["absent"].startswith("this part needs Transformer Engine, which is not installed")


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_later_call_runs_only_what_has_no_result(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    assert first["status"] == "done", (tmp_path / "first/on_gpu.log").read_text()
    file = tmp_path / "first/on_gpu.json"
    earlier = json.loads(file.read_text())
    earlier["parts"]["quantising"]["status"] = "cut off"
    del earlier["parts"]["quantising"]["cases"]["64 x 64 float32"]
    file.write_text(json.dumps(earlier))
    second = run(tmp_path / "second", "--skip-done", str(file))
    assert second["status"] == "done"
    assert second["cases"].keys() == first["cases"].keys()
    assert (tmp_path / "second/on_gpu.log").read_text().count("-- ") == 1
    assert run(tmp_path / "third", "--minutes", "0.1")["status"] == "not begun"
