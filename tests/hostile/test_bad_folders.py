"""A damaged file of one run: every verb that reads a folder of runs shows the others as ever, and names the file."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quantexp.capture import lines
from tests.hostile.file_damage import BROKEN, damages_of
from tests.hostile.roots import Result, add_run, add_sweep, run

GOOD = {
    "m_d_bf16-00000001": "bf16",
    "m_d_linear_mxfp8-00000002": "linear_mxfp8",
    "m_d_linear_mxfp4-00000003": "linear_mxfp4",
}
BAD = "m_d_FA_mxfp8-00000004"
#: File -> the verbs that read it of all runs, and so must name it when it is damaged.
READERS = {
    "status.json": {"status", "list", "compare", "report"},
    "metrics.jsonl": {"status", "list", "compare", "report", "draw"},
    "config.yaml": {"status", "list", "compare", "report", "draw"},
    "provenance.json": {"compare", "report"},
    "precision.json": {"compare", "report"},
    "tensors/manifest.jsonl": {"draw", "captures"},
    "tensors/statistics.jsonl": {"draw", "captures"},
    "tensors/report.json": set(),
    "logs/rank0.json": set(),
    "logs/rank0.log": set(),
}


class Root:
    """A folder of good runs, and what the verbs say of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"
        for name, scheme in GOOD.items():
            add_run(self.folder, scheme, name)
        self.listed = self._rows(self.listing())
        self.standing = self._rows(self.status())
        self.compared = self._compared(self.compare())
        self.captured = [self.captures(name).json for name in GOOD]
        #: Copied into each case, and damaged there.
        self.bad = add_run(folder / "bad", "FA_mxfp8", BAD).root

    def listing(self) -> Result:
        return run("list", "runs", "--json", f"paths.root={self.folder}")

    def status(self) -> Result:
        return run("status", "--json", f"paths.root={self.folder}")

    def compare(self) -> Result:
        return run("compare", str(self.folder), "--json")

    def captures(self, name: str) -> Result:
        return run("captures", str(self.folder / name), "--json")

    @staticmethod
    def _rows(result: Result) -> dict[str, Any]:
        rows = result.json["runs"] if isinstance(result.json, dict) else result.json
        return {row["run"]: row for row in rows}

    @staticmethod
    def _compared(result: Result) -> dict[str, Any]:
        rows = result.json["runs"]
        changing = ("label", "baseline", "differs", "config", "precision")
        return {
            Path(row["run"]).name: {k: v for k, v in row.items() if k not in changing}
            for row in rows
        }

    def require_good(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Check that the verbs show the good runs as without the bad one; what they say of the bad one."""
        listed, standing = self._rows(self.listing()), self._rows(self.status())
        result = self.compare()
        compared = self._compared(result)
        for name in GOOD:
            assert listed[name] == self.listed[name]
            assert standing[name] == self.standing[name]
            assert compared[name] == self.compared[name]
        return listed.get(BAD, {}), standing.get(BAD, {}), result.json["warnings"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(tmp_path_factory.mktemp("root"))


def damaged(root: Root, file: str, kind: str, rng: random.Random) -> Path:
    """The bad run anew beside the good ones, with one damaged file."""
    folder = root.folder / BAD
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root.bad, folder)
    damages_of(folder / file)[kind](folder / file, rng)
    sys.stdout.write(f"{file}: {kind}\n")
    return folder


def choices(
    cases: Iterator[random.Random], verb: str | None = None
) -> Iterator[tuple[str, str, random.Random]]:
    """Every damage of every file, or of those that a verb reads, in turn and from a random one on."""
    files = [file for file, verbs in READERS.items() if verb is None or verb in verbs]
    every = [(file, kind) for file in files for kind in damages_of(Path(file))]
    for number, rng in enumerate(cases):
        if number % len(every) == 0:
            rng.shuffle(every)
        yield *every[number % len(every)], rng


def test_the_other_runs_are_shown_as_ever_and_the_damaged_file_is_named(
    root: Root, cases: Iterator[random.Random]
) -> None:
    for file, kind, rng in choices(cases):
        damaged(root, file, kind, rng)
        listed, standing, warnings = root.require_good()
        for row in (listed, standing):
            assert row["state"] != "unreadable" or row["reason"] == standing["reason"]
        assert (listed["state"] == "unreadable") == (standing["state"] == "unreadable")
        readers = READERS[file] if kind in BROKEN else set()
        name = file.rpartition("/")[2]
        if "list" in readers:
            assert listed["state"] == "unreadable"
            assert name in listed["reason"]
        if "status" in readers:
            assert standing["state"] == "unreadable"
            assert name in standing["reason"]
        if "compare" in readers:
            assert any(f"{BAD}/{file}" in words for words in warnings), warnings


@pytest.mark.parametrize("state", ["running", "pending", "preempted"])
def test_damage_to_a_run_that_has_not_ended_harms_no_other(
    root: Root, cases: Iterator[random.Random], state: str
) -> None:
    """Such a run is read further: its lock, its claim, its capture and the time it has left."""
    files = [*READERS, ".lock", ".claim"]
    for rng in islice(cases, 20):
        folder = root.folder / BAD
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root.bad, folder)
        content = json.loads((folder / "status.json").read_text())
        content |= {
            "state": state,
            "finished": None,
            "iterations": 1 << 60,
            "host": "far",
            "pid": 7,
        }
        content |= {"capture": {"tensors": 3}, "tracking": {}}
        (folder / "status.json").write_text(json.dumps(content))
        (folder / ".claim").write_text("{}")
        (folder / ".lock").touch()
        file = folder / rng.choice(files)
        kind = rng.choice(sorted(damages_of(file)))
        damages_of(file)[kind](file, rng)
        sys.stdout.write(f"{file.name}: {kind}\n")
        root.require_good()


def test_the_text_for_people_and_cancel_survive_too(
    root: Root, cases: Iterator[random.Random]
) -> None:
    for file, kind, rng in choices(cases):
        damaged(root, file, kind, rng)
        readers = READERS[file] if kind in BROKEN else set()
        where = f"paths.root={root.folder}"
        for verb in ("list", "status", "cancel"):
            result = run(verb, *["runs"] * (verb == "list"), where)
            assert (result.code, result.err) == (0, ""), verb
            if verb != "cancel":
                assert all(name in result.out for name in GOOD)
            if verb in readers:
                assert "unreadable" in result.out
        for verb in ("resume", "retry"):
            result = run(verb, where)
            assert result.code == 1
            assert (
                result.err.startswith("quantexp: nothing to start again in ") or kind not in BROKEN
            )
        if (file, kind) != ("logs/rank0.log", "a sparse file"):
            assert run("logs", BAD, where).code in (0, 1)


@pytest.mark.parametrize("verb", ["report", "draw", "captures"])
def test_pictures_pages_and_captures_are_made_of_the_others(
    root: Root,
    cases: Iterator[random.Random],
    verb: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for file, kind, rng in choices(cases, verb):
        folder = damaged(root, file, kind, rng)
        must_be_named = kind in BROKEN
        if verb == "report":
            result = run("report", str(root.folder), f"out={tmp_path / 'page.html'}")
            assert result.code == 0
            page = (tmp_path / "page.html").read_text()
            assert all(name in page for name in GOOD)
            assert f"{BAD}/{file}" in page or not must_be_named
        elif verb == "draw":
            out = tmp_path / "drawn"
            shutil.rmtree(out, ignore_errors=True)
            result = run(
                "draw", str(root.folder), "--only", "statistics", "--jobs", "1", f"out={out}"
            )
            assert result.code == 1 or not must_be_named
            assert f"{BAD}/{file}" in result.err or not must_be_named
            table = (out / "tensor_stats.txt").read_text()
            assert all(f"  {name}: 2\n" in table for name in GOOD)
        else:
            assert [root.captures(name).json for name in GOOD] == root.captured
            result = root.captures(BAD)
            assert result.code in (0, 1)
            warned = result.err + caplog.text
            assert str(folder / file) in warned or not must_be_named
            caplog.clear()
            lines._WARNED.clear()


def test_a_sweeps_list_harms_only_itself(root: Root, cases: Iterator[random.Random]) -> None:
    shutil.rmtree(root.folder / BAD, ignore_errors=True)
    for rng in cases:
        file = add_sweep(root.folder, list(GOOD))
        kinds = damages_of(file)
        kind = rng.choice(list(kinds))
        kinds[kind](file, rng)
        root.require_good()
        result = run("status", str(file), "--json")
        if kind in BROKEN:
            assert result.code == 1
            assert file.name in result.err
            assert result.err.count("\n") == 1
        else:
            assert result.code in (0, 1)
        shutil.rmtree(root.folder / "sweeps")
