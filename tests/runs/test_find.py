"""The allowed values of DIR and RUN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.runs.find import Missing, existing_or_named, find_run, scope
from quantexp.runs.paths import RunDir, RunsRoot, Submission
from quantexp.runs.status import write_json

MakeRun = Callable[..., RunDir]

NAMES = ["m_d_FA_mxfp4-00000003", "m_d_FA_mxfp8-00000002", "m_d_bf16-00000001"]


@pytest.fixture
def root(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        make_run(name)
    shared = RunsRoot(tmp_path / "runs")
    for folder in (shared.sweeps, shared.snapshots / "ab-12", shared.submissions / "quantexp-1"):
        folder.mkdir(parents=True)
    runs = [shared.root / name for name in (*NAMES[:2], "m_d_lost-00000009")]
    write_json(
        Submission(shared.submissions / "quantexp-1").tasks,
        {"runs": [str(run) for run in runs], "snapshot": "snapshots/a", "umask": 0o22},
    )
    entries = [
        {"run": NAMES[2], "state": "completed", "skipped": True, "reason": "already completed"},
        {"run": NAMES[0], "state": "failed", "skipped": False, "reason": "loss nan"},
        {"run": NAMES[0], "state": "failed", "skipped": False, "reason": "loss nan"},
        {"run": "m_d_gone-00000008", "state": "failed", "skipped": False, "reason": ""},
        {"run": None, "state": "failed", "skipped": False, "reason": "m d odd: no data"},
    ]
    write_json(shared.sweeps / "20261121_050000_000001.json", {"started": "", "runs": entries})
    return shared.root


def names(target: str | None, root: Path) -> list[str]:
    return [run.root.name for run in scope(target, root).runs]


def test_without_dir_the_scope_is_every_run_below_the_root(root: Path) -> None:
    assert names(None, root) == NAMES
    assert names("runs", root) == NAMES
    assert scope(None, root / "none").runs == ()


def test_run_of_any_name_is_below_the_root_but_no_hidden_one(root: Path, make_run: MakeRun) -> None:
    """Megatron-LM's users name the folder themselves."""
    make_run("mine")
    make_run(".mine-00000001")
    assert names(None, root) == sorted([*NAMES, "mine"])
    assert names("mine", root) == ["mine"]


@pytest.mark.parametrize("target", ["runs/m_d_bf16-00000001", "m_d_bf16-00000001", "bf16-00000001"])
def test_scope_of_one_run_is_its_path_name_or_a_part_of_it(root: Path, target: str) -> None:
    assert names(target, root) == ["m_d_bf16-00000001"]
    assert scope(target, root).missing == ()


@pytest.mark.parametrize(
    "target",
    [
        "runs/sweeps/20261121_050000_000001.json",
        "runs/sweeps/20261121_050000_000001",
        "20261121_050000_000001",
    ],
)
def test_scope_of_a_sweep_is_its_runs_once_and_the_missing_ones(root: Path, target: str) -> None:
    assert names(target, root) == [NAMES[2], NAMES[0]]
    assert scope(target, root).missing == (
        Missing("m_d_gone-00000008", f"its folder is gone: {root / 'm_d_gone-00000008'}"),
        Missing("-", "did not start: m d odd: no data"),
    )


@pytest.mark.parametrize("target", ["runs/submissions/quantexp-1", "quantexp-1"])
def test_scope_of_a_submission_is_its_runs_in_their_order(root: Path, target: str) -> None:
    assert names(target, root) == NAMES[:2]
    (missing,) = scope(target, root).missing
    assert missing.name == "m_d_lost-00000009"


def test_part_of_several_names_is_no_scope(root: Path) -> None:
    with pytest.raises(RunError, match="RUN must be a part of one run's name, got 'FA_', which"):
        scope("FA_", root)


def test_missing_folder_is_refused_with_a_remedy(root: Path) -> None:
    with pytest.raises(RunError) as caught:
        scope("runs/nothing", root)
    assert str(caught.value) == (
        "there is no run, sweep or folder runs/nothing, and no run in runs has that in its name; see quantexp list runs"
    )


def test_folder_without_runs_is_refused_with_a_remedy(root: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(RunError, match=r"data holds no runs: it must be a folder of runs, a run's"):
        scope("data", root)


def test_root_of_the_disk_is_a_folder_like_any_other(root: Path) -> None:
    with pytest.raises(RunError, match=r"^/ holds no runs: it must be a folder of runs, a run's"):
        scope("/", root)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"runs": 3}', '{"runs": [3]}'])
def test_file_that_is_no_sweep_is_refused(root: Path, text: str) -> None:
    (root / "sweeps" / "odd.json").write_text(text)
    with pytest.raises(RunError, match=r"odd\.json is not a sweep's list of runs; give one of"):
        scope("odd", root)


def test_submission_of_work_beside_training_is_refused_with_what_to_do(root: Path) -> None:
    folder = root / "submissions" / "draw-20260102-030405-1e84"
    folder.mkdir()
    write_json(Submission(folder).plan, {})
    with pytest.raises(RunError) as error:
        scope(folder.name, root)
    assert str(error.value) == (
        f"{folder} has jobs of quantexp draw, which are no runs: that command shows them, "
        "scancel --name=draw-20260102-030405-1e84 ends them, and their output is there"
    )


def test_submission_without_its_list_is_refused(root: Path) -> None:
    (root / "submissions" / "quantexp-2").mkdir()
    with pytest.raises(RunError, match=r"tasks\.json is gone: .*quantexp-2 is not a submission's"):
        scope("quantexp-2", root)
    Submission(root / "submissions" / "quantexp-2").tasks.write_text("{")
    with pytest.raises(RunError, match=r"tasks\.json is not a submission's list of runs; give"):
        scope("quantexp-2", root)


@pytest.mark.parametrize(
    "target", ["runs/m_d_FA_mxfp8-00000002", "FA_mxfp8", "00000002", "m_d_FA_mxfp8-00000002"]
)
def test_part_of_a_name_identifies_its_run(root: Path, target: str) -> None:
    assert find_run(target, root).root == root / "m_d_FA_mxfp8-00000002"


def test_part_of_several_names_or_of_none_is_refused(root: Path) -> None:
    with pytest.raises(RunError) as caught:
        find_run("FA_", root)
    assert str(caught.value) == (
        f"RUN must be a part of one run's name, got 'FA_', which fits\n  {NAMES[0]}\n  {NAMES[1]}"
    )
    with pytest.raises(
        RunError, match=r"RUN must be a run's folder or a part of its name, got 'linear', and no"
    ):
        find_run("linear", root)


@pytest.mark.parametrize("find", [scope, find_run, existing_or_named])
def test_mistyped_run_is_refused_with_a_suggestion(
    root: Path, find: Callable[[str, Path], object]
) -> None:
    for word, meant in (("FA_mxpf8", "FA_mxfp8"), ("FA_mxpf8-00000002", "FA_mxfp8-00000002")):
        with pytest.raises(RunError, match=rf"; did you mean {meant}.*\? see quantexp"):
            find(word, root)


def test_a_verb_that_takes_a_path_takes_a_part_of_a_name_too(root: Path, tmp_path: Path) -> None:
    run = root / "m_d_FA_mxfp8-00000002"
    assert existing_or_named("FA_mxfp8", root) == str(run)
    assert existing_or_named(str(tmp_path), root) == str(tmp_path)
    with pytest.raises(RunError, match=r"no run, sweep or folder linear, and no run in runs has"):
        existing_or_named("linear", root)
    with pytest.raises(
        RunError, match=r"a part of one run's name, got 'FA_', which fits\n  m_d_FA"
    ):
        existing_or_named("FA_", root)


def test_some_of_many_fitting_names_are_listed_one_on_a_line(root: Path, make_run: MakeRun) -> None:
    for i in range(4):
        make_run(f"m_d_x-{i}")
    with pytest.raises(RunError) as caught:
        find_run("m_d", root)
    first, *names, more = str(caught.value).splitlines()
    assert first == "RUN must be a part of one run's name, got 'm_d', which fits"
    assert names == [f"  {name}" for name in [*NAMES, "m_d_x-0", "m_d_x-1"]]
    assert more == "  and 2 more"
