"""The command line: exit codes, verbs, and which verbs import what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from quantexp import __version__
from quantexp.cli.main import main
from quantexp.cli.verbs import all_verbs

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / ".cache"))


def misuse(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_and_version_exit_with_0(capsys: Captured) -> None:
    assert misuse("--help") == 0
    text = capsys.readouterr().out
    for verb in all_verbs():
        assert f"\n  {verb}" in text
    assert "quantexp model=llama32-1b dataset=wikipedia quant=FA_linear_mxfp8" in text
    assert misuse("--version") == 0
    assert capsys.readouterr().out == f"quantexp {__version__}\n"


def test_users_error_is_one_line_on_standard_error_and_1(capsys: Captured) -> None:
    assert main(["quant=linear_mxfp8", "quant.linear.block=24"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "quantexp: quant.linear.block must be a power of two, got 24\n"
    assert captured.out == ""


def test_without_any_word_the_help_is_printed_and_nothing_runs(capsys: Captured) -> None:
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
def test_closed_terminal_is_an_interrupt_except_under_nohup(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, before: signal.Handlers, after: str
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
            assert main(["training=fast"]) == 1
            assert "unexpected ZeroDivisionError: ignored" in capsys.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "pipe", "code"),
    [(["list"], "|", 1), (["list", "foo"], "2>&1 |", 1), (["--dry-run"], "2>&1 |", 2)],
)
def test_closed_pipe_ends_the_command_quietly(words: list[str], pipe: str, code: int) -> None:
    script = f"import sys\nfrom quantexp.cli.main import main\nsys.exit(main({words}))\n"
    command = f'{sys.executable} -c "{script}" {pipe} true'
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert process.stderr == ""
    assert process.returncode == code
    assert not list(Path.cwd().rglob("tracebacks"))


def test_completion_never_shows_a_traceback(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("quantexp.cli.completion.candidate_lines", broken)
    assert main(["__complete", "quantexp", "plan"]) == 0
    assert capsys.readouterr() == ("", "")


def test_flags_may_stand_between_the_overrides(capsys: Captured, tmp_path: Path) -> None:
    assert main(["training=fast", "-cd", str(tmp_path / "none"), "quant=bf16"]) == 1
    assert "--config-dir must be a folder, got" in capsys.readouterr().err


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
    process = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_every_verb_has_a_module_that_runs_it() -> None:
    for name, verb in all_verbs().items():
        assert callable(import_module(verb.module or f"quantexp.cli.{name}").run), name
