"""Runs that do not fit are refused before any starts; no test takes the memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.capture.select.budget import price
from quantexp.cli.main import main
from quantexp.errors import CaptureError, ConfigError, TooLargeError
from quantexp.launch.attempt import open_run
from quantexp.launch.refusal import (
    Request,
    by_reason,
    require_memory,
    require_startable,
    too_large_together,
)
from quantexp.memory.room import needed_gb, require_memory_here
from quantexp.runs.outcome import record_end
from quantexp.runs.status import State, read_status, write_status
from quantexp.schema import Experiment
from quantexp.training.worker import Worker

Captured = pytest.CaptureFixture[str]
Make = Callable[..., Experiment]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the memory of this machine."""

    def has(gb: float) -> None:
        for module in ("quantexp.memory.room", "quantexp.launch.refusal"):
            monkeypatch.setattr(f"{module}.host_memory_gb", lambda: gb)

    return has


def refused(*experiments: Experiment) -> str:
    with pytest.raises(TooLargeError) as caught:
        require_memory([Request(experiment) for experiment in experiments])
    return str(caught.value)


def test_single_run_is_refused_in_one_line_with_what_would_fit(
    in_tmp: Path, machine: Callable[[float], None], capsys: Captured
) -> None:
    machine(25.3)
    assert main(["model=llama31-8b", "dataset.sample=true"]) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(
        r"quantexp: [\d.]+ GB do not fit in 25.3 GB \(this machine\): training.attention=fused .*, or training=fast "
        r"\(the quick test\) takes [\d.]+ GB; memory=ignore starts it anyway\n",
        captured.err,
    )
    assert captured.out == ""
    assert not list(in_tmp.iterdir()), "nothing was started"


def test_captures_that_together_exceed_the_free_disk_are_refused_before_any_run(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"paths.root={tmp_path / 'runs'}"
    runs = [Request(tiny("capture=tensors", root, f"training.seed={seed}")) for seed in (1, 2)]

    class Usage:
        free = int(1.5 * price(runs[0].experiment).on_disk)

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(CaptureError, match="the captures of 2 runs would take"):
        require_startable(runs)
    require_startable(runs[:1])
    monkeypatch.setattr(
        "quantexp.launch.refusal._starts", lambda experiment: experiment is runs[0].experiment
    )
    require_startable(runs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("capture.max_gb=0", "and capture.max_gb allows 0; "),
        ("training.lr=1e-4", " GB with its lists, and .* GB free; "),
        ("checkpoint.at_end=true", r"1 checkpoints would take [\d.e-]+ GB, and .* has 0 GB free; "),
    ],
)
def test_a_run_that_the_disk_has_no_room_for_leaves_no_folder(
    word: str, message: str, in_tmp: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "max_gb" not in word:
        Usage = type("Usage", (), {"free": 0})
        monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    level = "capture=off" if "checkpoint" in word else "capture=tensors"
    assert main(["model=tiny", "dataset=synthetic", "training=fast", level, word]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not list(in_tmp.iterdir())


def test_advice_is_computed_once_and_only_for_refused_runs(
    tiny: Make, machine: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    advised = []

    def counted(experiment: Experiment, *_: object, **__: object) -> str:
        advised.append(experiment)
        return "too large"

    monkeypatch.setattr("quantexp.launch.refusal.misfit", counted)
    small, large = tiny(), tiny("training.seq_length=128", "training.micro_batch_size=2")
    machine((needed_gb(small) + needed_gb(large)) / 2)
    assert needed_gb(small) < needed_gb(large)
    refused(small, large)
    assert advised == [large]


def test_sweep_names_every_run_that_does_not_fit_and_starts_none(
    in_tmp: Path, machine: Callable[[float], None], capsys: Captured
) -> None:
    machine(4.0)
    words = ["-m", "training=fast", "model=llama32-1b,llama31-8b", "quant=bf16,FA_mxfp8"]
    assert main(words) == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == (
        "quantexp: 2 of 4 runs do not fit in memory, and no run was started; memory=ignore starts them anyway"
    )
    (line,) = lines
    assert re.match(
        r"  llama31-8b bf16; llama31-8b FA_mxfp8: [\d.]+ GB do not fit in 4.0 GB \(this machine\): ",
        line,
    )
    assert not list(in_tmp.iterdir())


def test_sweep_of_which_no_run_fits_is_refused(
    tiny: Make, machine: Callable[[float], None]
) -> None:
    machine(0.001)
    message = refused(tiny("quant=bf16"), tiny("quant=FA_mxfp8"))
    assert message.startswith("2 of 2 runs do not fit in memory, and none of them was started; ")


def test_ignore_starts_a_run_that_does_not_fit(
    tiny: Make, machine: Callable[[float], None]
) -> None:
    machine(0.001)
    experiment = tiny("memory=ignore")
    require_memory([Request(experiment)])
    require_memory_here(experiment)


def test_word_that_is_neither_check_nor_ignore_is_refused(capsys: Captured) -> None:
    assert main(["training=fast", "memory=ignored"]) == 1
    error = capsys.readouterr().err
    assert "memory" in error
    assert "check, ignore" in error


def test_number_is_the_memory_of_each_process(tiny: Make, machine: Callable[[float], None]) -> None:
    machine(0.001)
    require_memory([Request(tiny("memory=80"))])
    require_memory_here(tiny("memory=80"))
    message = refused(tiny("memory=0.001"))
    assert re.search(r"[\d.]+ GB do not fit in 0.0 GB \(memory=0.001\): ", message)
    with pytest.raises(TooLargeError, match=re.escape("(memory=0.001)")):
        require_memory_here(tiny("memory=0.001"))


@pytest.mark.parametrize("word", ["0", "-1", "true", "some", "null", "[1]"])
def test_memory_is_a_word_or_a_positive_number(tiny: Make, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(f"memory={word}")
    assert "memory must be one of check, ignore, or the GB of each process such as 80, got" in str(
        caught.value
    )


def test_completed_run_is_not_refused(tiny: Make, machine: Callable[[float], None]) -> None:
    experiment = tiny("capture=off")
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        status = read_status(folder.run.status)
        assert status is not None
        status.state, status.iteration = State.COMPLETED, status.iterations
        write_status(folder.run.status, status)
    machine(0.001)
    require_memory([Request(experiment)])
    assert "do not fit in 0.0 GB" in refused(tiny("capture=off", "training.seed=7"))


def test_run_without_its_data_is_not_refused_here(
    tiny: Make, machine: Callable[[float], None]
) -> None:
    machine(0.001)
    require_memory([Request(tiny("dataset.sample=false"))])


def test_runs_at_once_have_to_fit_together(tiny: Make, machine: Callable[[float], None]) -> None:
    seeds = [tiny("launcher.max_parallel=4", f"training.seed={seed}") for seed in (1, 2, 3)]
    each = needed_gb(seeds[0])
    machine(3 * each + 0.001)
    require_memory([Request(experiment) for experiment in seeds])
    machine(2 * each + 0.001)
    assert refused(*seeds) == (
        f"launcher.max_parallel=4: the 3 largest runs take {3 * each:.1f} GB together, which do not fit in "
        f"{2 * each + 0.001:.1f} GB (this machine): launcher.max_parallel=2 takes {2 * each:.1f} GB; memory=ignore "
        "starts them anyway"
    )
    machine(each - 0.001)
    assert too_large_together(seeds) is None  # each is refused by itself
    assert too_large_together([tiny("launcher=slurm", "launcher.max_parallel=4")] * 9) is None
    assert too_large_together([tiny("launcher.max_parallel=4", "memory=ignore")] * 9) is None


def test_resume_and_retry_refuse_too_and_take_memory_ignore(
    tiny: Make, machine: Callable[[float], None], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny()
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        pass
    root = f"paths.root={experiment.paths.root}"
    machine(0.001)
    started: list[object] = []
    monkeypatch.setattr(
        "quantexp_launchers.local.submit.run_points", lambda p, _: started.append(p) or 0
    )
    for verb, number in (("resume", 1), ("retry", 2)):
        assert main([verb, root]) == 1
        assert "do not fit in 0.0 GB (this machine)" in capsys.readouterr().err
        assert main([verb, root, "memory=ignore"]) == 0
        assert len(started) == number
        record_end(folder.run, State.FAILED, "an error")
    assert folder.run.root.exists()


def test_worker_that_does_not_fit_fails_cleanly_before_it_builds_anything(
    tiny: Make, machine: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0.001)
    monkeypatch.setattr("quantexp.training.megatron.trainer.train", None)
    experiment = tiny()
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        assert Worker(folder.run, experiment).run() == 1
    status = read_status(folder.run.status)
    assert status is not None
    assert status.state is State.FAILED
    assert "GB do not fit in 0.0 GB (this machine): " in status.reason
    assert status.reason.endswith("; memory=ignore starts it anyway")


def test_names_are_gathered_by_their_reason() -> None:
    assert by_reason([("a", "x"), ("b", "y"), ("c", "x")]) == {"x": ["a", "c"], "y": ["b"]}
