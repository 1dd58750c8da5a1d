"""quantexp list runs: states, damaged runs, and how they fit the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.cli import ledger, list_runs
from quantexp.cli.list import record, show
from quantexp.cli.list_runs import run_rows
from quantexp.cli.main import main
from quantexp.folders import conf_dir
from quantexp.runs.metrics import last_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status

from .test_list import Captured


def finished_run(root: Path, name: str, status: Status, metrics: str | None = None) -> None:
    run = RunDir(root / name)
    run.root.mkdir(parents=True)
    write_status(run.status, status)
    run.config.write_text("model: {}\n")
    if metrics is not None:
        run.metrics.write_text(metrics)


def _truncated(file: Path) -> None:
    file.write_text(file.read_text()[:-2])


def _folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere")


#: What happened to a file, and how it reads in every table.
DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "config.yaml",
        Path.unlink,
        "broken: its config.yaml is gone; restore it, or delete the folder",
    ),
    ("config.yaml", _dangling, "broken: its config.yaml is gone; restore it, or delete the folder"),
    ("config.yaml", _folder_instead, "config.yaml must be a file, and is a folder"),
    ("config.yaml", lambda file: file.write_text(" \n"), "config.yaml is empty"),
    ("config.yaml", _truncated, "config.yaml, line "),
    (
        "config.yaml",
        lambda file: file.write_text("model: {num_layers: many}"),
        "config.yaml: model.num_layers must be a whole number, got 'many'",
    ),
    ("status.json", Path.unlink, "it has no status.json: it was never started"),
    ("status.json", _truncated, "status.json, line "),
    (
        "metrics.jsonl",
        lambda file: file.write_text('{"iteration": []}\n'),
        "metrics.jsonl, line 1: iteration must be a whole number from 0",
    ),
]


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.RUNNING])
@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_list_runs_and_status_say_the_same_of_a_damaged_run(
    tmp_path: Path, name: str, damage: Callable[[Path], object], words: str, state: State
) -> None:
    """The running run lives as far as anyone can tell: its launcher is not installed here."""
    status = Status(state, iterations=1, launcher="pbs", job_id="1")
    finished_run(tmp_path, "m_d_a-1", status, '{"iteration": 1, "loss": 5.25}\n')
    damage(tmp_path / "m_d_a-1" / name)
    listed = run_rows(tmp_path)[0]
    shown = ledger.record(None, tmp_path)[0]
    assert (listed["state"], listed["reason"]) == (shown["state"], shown["reason"])
    assert listed["state"] == "unreadable"
    assert str(listed["reason"]).startswith(words)


def test_runs_are_listed_newest_first_and_damaged_ones_have_a_reason(tmp_path: Path) -> None:
    finished_run(
        tmp_path, "m_d_a-1", Status(State.FAILED, "[no] data", created="2026-01-01T00:00:00+00:00")
    )
    completed = Status(
        State.COMPLETED, created="2026-02-01T00:00:00+00:00", iteration=8, iterations=8
    )
    finished_run(
        tmp_path,
        "m_d_b-2",
        completed,
        '{"iteration": 7, "loss": 5.5}\n{"iteration": 8, "loss": 5.25}\n{"lo',
    )
    (tmp_path / "m_d_c-3").mkdir()
    (tmp_path / "m_d_d-4").mkdir()
    (tmp_path / "m_d_d-4" / "status.json").write_text("{")
    rows = run_rows(tmp_path)
    assert [(row["run"], row["state"], row["loss"]) for row in rows] == [
        ("m_d_b-2", "completed", 5.25),
        ("m_d_a-1", "failed", None),
        ("m_d_d-4", "unreadable", None),
    ]
    assert str(rows[2]["reason"]).startswith("status.json, line 1: ")
    out = io.StringIO()
    show({"runs": rows}, Console(file=out, width=100))
    text = out.getvalue()
    assert "8/8" in text
    assert "5.2500" in text
    assert "[no] data" in text


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_listed_runs_fit_every_width_without_a_broken_word(tmp_path: Path, width: int) -> None:
    name = "llama32-1b_wikipedia_FA_linear_mxfp8-36da3b10"
    reason = "loss nan, gradient norm inf in 8 iterations in a row"
    finished_run(tmp_path, name, Status(State.FAILED, reason, created="2026-01-01T00:00:00+00:00"))
    (tmp_path / name / "config.yaml").write_text("model: {name: mine, num_layers: 2}")
    out = io.StringIO()
    show({"runs": run_rows(tmp_path)}, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(reason.split()) in " ".join(out.getvalue().split())
    assert name in out.getvalue() or width == 60


def test_a_listed_run_has_its_model(tmp_path: Path) -> None:
    finished_run(tmp_path, "m_d_a-1", Status(State.COMPLETED, created="2026-01-01T00:00:00+00:00"))
    shape = (
        (conf_dir() / "model" / "llama32-1b.yaml").read_text().replace("layers: 16", "layers: 2")
    )
    indented = "".join(f"  {line}\n" for line in shape.splitlines())
    (tmp_path / "m_d_a-1" / "config.yaml").write_text(f"model:\n{indented}")
    assert run_rows(tmp_path)[0]["model"] == "llama32-1b cut to 384M of 1.24B parameters"


def test_runs_are_read_as_they_are_printed_and_their_columns_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest run has the longest name, a large loss and damaged metrics, and still fits its columns."""
    monkeypatch.setattr(list_runs, "_TOGETHER", 2)
    read: list[str] = []
    monkeypatch.setattr(
        list_runs, "last_metrics", lambda run: (read.append(run.root.name), last_metrics(run))[1]
    )
    for day, (name, metrics) in enumerate(
        {
            "m_d_much-longer-3": '{"iteration": 1',
            "m_d_damaged-4": '{"iteration": "x", "loss": 1}\n',
            "m_d_b-2": '{"iteration": 1, "loss": 123456.75}\n',
            "m_d_a-1": '{"iteration": 1, "loss": 5.25}\n',
            "m_d_a-0": "",
        }.items(),
        start=1,
    ):
        status = Status(State.COMPLETED, created=f"2026-01-0{day}T00:00:00+00:00", iterations=1)
        finished_run(tmp_path, name, status, metrics)
    rows = run_rows(tmp_path)
    assert (len(rows), read) == (5, [])
    seen: list[int] = []
    out = io.StringIO()
    monkeypatch.setattr(
        out, "write", lambda text: (seen.append(len(read)), io.StringIO.write(out, text))[1]
    )
    show({"runs": rows}, Console(file=out, width=120))
    assert seen[0] == 2
    lines = out.getvalue().splitlines()
    assert [line.split()[3] for line in lines[2:7]] == ["-", "5.2500", "1.23e+05", "-", "-"]
    column = lines[1].index("state")
    assert all(line[column - 2 : column] == "  " for line in lines[1:7])
    assert lines[5][column:].startswith("unreadable")
    assert lines[7].startswith("m_d_damaged-4: metrics.jsonl, line 1: iteration must be")


def test_damage_of_a_configuration_has_its_line_and_other_sections_of_a_model_do_not_count(
    tmp_path: Path,
) -> None:
    for name, text in {
        "m_d_a-1": "model:\n  name: mine\n  # note\n\n  num_layers: 2\ntraining: {lr: 1}\n",
        "m_d_b-2": "seed: 1\nmodel:\n  name: [\n",
        "m_d_c-3": "training: {}\nmodel:\n  num_layers: many\n",
        "m_d_d-4": "'model': {name: quoted}\n",
    }.items():
        finished_run(
            tmp_path, name, Status(State.COMPLETED, created=f"2026-01-0{name[-1]}T00:00:00+00:00")
        )
        (tmp_path / name / "config.yaml").write_text(text)
    rows = {row["run"]: row for row in run_rows(tmp_path)}
    assert rows["m_d_a-1"]["model"] == "mine"
    assert rows["m_d_d-4"]["model"] == "quoted"
    assert rows["m_d_b-2"]["reason"].startswith("config.yaml, line 4: ")
    assert rows["m_d_c-3"]["reason"].startswith("config.yaml: model.num_layers must be")


def test_list_of_no_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(record(["runs"], None, tmp_path), Console())
    assert capsys.readouterr().out == "runs: none\n"


def test_list_of_runs_may_be_empty(capsys: Captured, in_tmp: Path) -> None:
    assert main(["list", "runs"]) == 0
    assert capsys.readouterr().out == "runs: none\n"
