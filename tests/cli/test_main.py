"""The command line: exit codes, verbs, and what is imported when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from quantexp import __version__
from quantexp.cli.main import main
from quantexp.cli.verbs import VERBS
from quantexp.quant.scheme import SCHEMES
from quantexp.schema import Experiment

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


def misuse(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert isinstance(caught.value.code, int)
    return caught.value.code


# Exit codes.


def test_help_and_version_end_well(capsys: Captured) -> None:
    assert misuse("--help") == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb}" in text
    assert "quantexp model=llama32-1b dataset=wikipedia quant=FA_linear_mxfp8" in text
    assert misuse("--version") == 0
    assert capsys.readouterr().out == f"quantexp {__version__}\n"


def test_users_error_is_one_line_on_standard_error_and_1(capsys: Captured) -> None:
    assert main(["quant=linear_mxfp8", "quant.linear.block=24"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "quantexp: quant.linear.block must be a power of two, got 24\n"
    assert captured.out == ""


def test_without_any_word_the_help_is_shown_and_nothing_runs(capsys: Captured) -> None:
    assert misuse() == 0
    assert capsys.readouterr().out.startswith("usage: quantexp [VERB] [flags] group=choice")
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is neither a verb nor key=value; did you mean train?"),
        (["plan", "nothing"], "'nothing' is neither a verb nor key=value;"),
        (["FA_mxfp8", "-m"], "'FA_mxfp8' is neither a verb nor key=value; did you mean quant=FA_m"),
        (["plan", "fast"], "'fast' is neither a verb nor key=value; did you mean training=fast?"),
        (
            ["quant=bf16", "plan"],
            "plan is a verb: a command has one, before the overrides: quantexp plan ...;",
        ),
    ],
)
def test_word_that_is_neither_verb_nor_override_is_misuse(
    capsys: Captured, words: list[str], message: str
) -> None:
    assert misuse(*words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"quantexp: {message}")
    assert err.endswith(" see quantexp help\n")
    assert err.count("\n") == 1


def test_help_of_a_verb_is_its_own(capsys: Captured) -> None:
    assert main(["help", "logs"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: quantexp logs [--rank N] [-f] RUN [paths.root=FOLDER]\n")
    assert "--config-dir" not in text
    assert misuse("logs", "--help") == 0
    assert capsys.readouterr().out == text
    assert main(["help"]) == 0
    assert misuse("--help") == 0
    both = capsys.readouterr().out
    assert both[: len(both) // 2] == both[len(both) // 2 :]


def test_help_of_no_verb_suggests_one(capsys: Captured) -> None:
    assert misuse("help", "plna") == 2
    assert capsys.readouterr().err == (
        "quantexp: 'plna' is no verb; did you mean plan? see quantexp help help\n"
    )


def test_flags_may_stand_before_the_verb(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "mine" / "quant").mkdir(parents=True)
    (tmp_path / "mine" / "quant" / "my_scheme.yaml").write_text("# My own.\ndefaults: [FA_mxfp8]\n")
    assert main(["--config-dir", str(tmp_path / "mine"), "list", "schemes"]) == 0
    assert "my_scheme" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--nope"], ["list", "--multirun"], ["--json", "a=1"], ["-cd"]])
def test_unknown_flag_is_misuse(words: list[str]) -> None:
    assert misuse(*words) == 2


def test_interruption_is_130(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantexp_launchers.local.execute.execute", interrupted)
    assert main(["training=fast"]) == 130
    assert capsys.readouterr().err == "quantexp: interrupted\n"
    monkeypatch.setattr("quantexp_launchers.local.submit.run_points", interrupted)
    assert main(["-m", "training=fast", "quant=bf16,FA_mxfp8"]) == 130
    assert capsys.readouterr().err == "quantexp: interrupted\n"


@pytest.mark.parametrize(
    ("before", "after"), [(signal.SIG_DFL, "raised"), (signal.SIG_IGN, "ignored")]
)
def test_closed_terminal_is_an_interrupt_unless_nohup_has_it_ignored(
    monkeypatch: pytest.MonkeyPatch, before: signal.Handlers, after: str
) -> None:
    def hung_up(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise ZeroDivisionError("ignored")

    monkeypatch.setattr("quantexp_launchers.local.execute.execute", hung_up)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, before)
    try:
        if after == "raised":
            assert main(["training=fast"]) == 130
        else:
            with pytest.raises(ZeroDivisionError):
                main(["training=fast"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_detached_run_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Experiment] = []

    def detach(experiment: Experiment, _: object) -> int:
        given.append(experiment)
        return 0

    monkeypatch.setattr("quantexp_launchers.local.submit.detach_run", detach)
    assert main(["training=fast", "launcher.detach=true"]) == 0
    assert given[0].launcher.detach


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("quantexp_launchers.local.execute.execute", broken)
    with pytest.raises(ZeroDivisionError):
        main(["training=fast"])


def test_missing_data_without_the_sample_says_what_to_give(capsys: Captured) -> None:
    assert main(["dataset=dolma"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: dataset=dolma has no data: give dataset.path=PREFIX of a Megatron .bin/.idx "
        "pair (`quantexp prepare` makes one of raw text) and dataset.tokenizer_path=FOLDER, or "
        "training=fast for the built-in sample\n"
    )
    assert not list(Path.cwd().iterdir())


def test_missing_tokenizer_path_says_what_to_give(capsys: Captured) -> None:
    assert main(["training=fast", "dataset.path=/data/wiki"]) == 1
    assert capsys.readouterr().err.startswith(
        "quantexp: dataset.tokenizer=huggingface needs a path: give a folder with tokenizer.json"
    )


def test_flags_may_stand_between_the_overrides(capsys: Captured, tmp_path: Path) -> None:
    assert main(["training=fast", "-cd", str(tmp_path / "none"), "quant=bf16"]) == 1
    assert "--config-dir must be a folder, got" in capsys.readouterr().err


# plan and dry_run.


def test_plan_prints_json_without_data(capsys: Captured) -> None:
    assert main(["plan", "--json", "training=default", "capture=tensors"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"] == 1_235_814_400
    assert {"memory_gb_per_gpu", "capture_bytes", "precision_map", "commands"} <= set(content)
    assert content["capture_bytes"] > 0
    assert not list(Path.cwd().iterdir())


def test_plan_of_a_sweep_is_a_list(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [plan["scheme"] for plan in content] == ["bf16", "FA_mxfp8"]
    assert not list(Path.cwd().iterdir())


def test_plan_of_a_sweep_ends_with_its_sum(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast"]) == 0
    *_, total, captures = capsys.readouterr().out.splitlines()
    assert total.startswith("in all  2 runs, 3.0 TFLOP, about ")
    assert captures.startswith("capture 662.7 MB of values in 112 tensors, statistics of 112; ")
    assert captures.endswith(f" are free in {Path.cwd()}")


def test_plan_of_a_sweep_shows_maps_where_asked_for(capsys: Captured) -> None:
    words = ["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast", "training.seed=1,2"]
    assert main(words) == 0
    assert "precision map" not in capsys.readouterr().out
    assert main([*words, "--maps"]) == 0
    assert capsys.readouterr().out.count("precision map") == 2, "one for both seeds"


def test_plan_of_a_sweep_says_on_standard_error_what_was_merged(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,bf16", "training=fast", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 1
    assert captured.err == (
        "quantexp: quant=bf16 training=fast is there more than once: it runs once\n"
    )


@pytest.mark.parametrize(("flags", "shown"), [([], "precision map"), (["-m"], "in all  1 run,")])
def test_dry_run_shows_the_plan_and_runs_nothing(
    capsys: Captured, flags: list[str], shown: str
) -> None:
    assert main([*flags, "training=fast", "quant=FA_mxfp8", "dry_run=true"]) == 0
    assert shown in capsys.readouterr().out
    assert not list(Path.cwd().iterdir())


# list and doctor.


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("models", "llama32-1b"),
        ("datasets", "dolma"),
        ("schemes", "FA_linear_hifp8"),
        ("presets", "fast"),
        ("captures", "tensors"),
    ],
)
def test_list_prints_each_kind(capsys: Captured, kind: str, name: str) -> None:
    assert main(["list", kind]) == 0
    assert name in capsys.readouterr().out
    assert main(["list", kind, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert list(content) == [kind]
    assert name in [row["name"] for row in content[kind]]


def test_list_of_schemes_begins_with_the_ten(capsys: Captured) -> None:
    main(["list", "schemes", "--json"])
    rows = json.loads(capsys.readouterr().out)["schemes"]
    assert [row["name"] for row in rows[:10]] == list(SCHEMES)


def test_list_of_runs_may_be_empty(capsys: Captured) -> None:
    assert main(["list", "runs"]) == 0
    assert capsys.readouterr().out == "runs: none\n"


def test_list_of_an_unknown_kind_is_refused(capsys: Captured) -> None:
    assert main(["list", "widgets"]) == 1
    assert capsys.readouterr().err.startswith("quantexp: list must be one of models, datasets, ")


def test_doctor_takes_no_overrides(capsys: Captured) -> None:
    assert misuse("doctor", "training=fast") == 2
    assert "doctor takes no overrides, got training=fast" in capsys.readouterr().err


def test_doctor_answers_in_json(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(["doctor", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert code == (0 if content["ok"] else 1)
    assert "torch" in [check["name"] for check in content["checks"]]


# Imports.


@pytest.mark.parametrize(
    "words", [["--help"], ["list"], ["list", "runs"], ["plan", "--help"], ["requantise", "--help"]]
)
def test_help_and_list_import_no_torch(words: list[str]) -> None:
    script = (
        "import sys\nfrom quantexp.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy', 'tensorboard', 'wandb', 'mlflow'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


Points = list[tuple[Experiment, int]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> list[Points]:
    """What was given to be run as a sweep, instead of running it."""
    given: list[Points] = []

    def run_points(points: Points, _: Console) -> int:
        given.append(points)
        return 0

    monkeypatch.setattr("quantexp_launchers.local.submit.run_points", run_points)
    return given


def test_every_point_of_a_sweep_is_run_in_order(ran: list[Points]) -> None:
    assert main(["-m", "training=fast", "quant=bf16,FA_mxfp8", "sweep.first={quant: FA_*}"]) == 0
    (points,) = ran
    assert [(e.quant.name, stage) for e, stage in points] == [("FA_mxfp8", 0), ("bf16", 1)]


def test_bad_last_point_means_that_nothing_ran(ran: list[Points], capsys: Captured) -> None:
    assert main(["-m", "training=fast", "training.seed=1,2,-1"]) == 1
    assert "training.seed must be at least 0, got -1" in capsys.readouterr().err
    assert not ran
    assert not Path("runs").exists()


def test_dry_points_are_shown_and_not_run(ran: list[Points], capsys: Captured) -> None:
    assert main(["-m", "training=fast", "quant=bf16,FA_mxfp8", "dry_run=true"]) == 0
    assert not ran
    assert "in all  2 runs" in capsys.readouterr().out


def test_points_of_two_launchers_are_refused(ran: list[Points], capsys: Captured) -> None:
    assert main(["-m", "training=fast", "launcher=local,slurm"]) == 1
    assert (
        "launcher must be local or slurm for all points of a sweep, got both"
        in capsys.readouterr().err
    )
    assert not ran
