"""Shell completion after `quantexp`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantexp.cli.completion import candidate_lines, completions, script
from quantexp.cli.flags import KINDS, SHELLS
from quantexp.cli.main import main
from quantexp.cli.verbs import all_verbs
from quantexp.formats.definitions.files import known_names
from quantexp.quant.scheme import SCHEMES

RUN = "llama32-1b_wikipedia_FA_mxfp8-1a2b3c4d"
OTHER = "llama32-1b_wikipedia_bf16-5e6f7a8b"


@pytest.fixture
def runs(in_tmp: Path) -> Path:
    """A working directory with two runs, a sweep, and the user's own folder."""
    for name in (RUN, OTHER):
        (in_tmp / "runs" / name).mkdir(parents=True)
        (in_tmp / "runs" / name / "status.json").write_text("{}")
    (in_tmp / "runs" / "sweeps").mkdir()
    (in_tmp / "runs" / "sweeps" / "20260101.json").write_text("{}")
    (in_tmp / "mine" / "quant" / "april").mkdir(parents=True)
    (in_tmp / "mine" / "quant" / "april" / "my_scheme.yaml").write_text("# My own.\n")
    return in_tmp


def words(line: str) -> list[str]:
    return [*completions(f"quantexp {line}")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pl", ["plan"]),
        ("re", ["resume", "retry", "report", "requantise"]),
        ("mod", ["model=", "model."]),
        ("quant=FA_l", ["quant=FA_linear_hifp8", "quant=FA_linear_mxfp4", "quant=FA_linear_mxfp8"]),
        ("-m quant=bf16,FA_h", ["quant=bf16,FA_hifp8"]),
        ("quant=more/linear_nvfp4_of", ["quant=more/linear_nvfp4_of_forward"]),
        ("quant/pv=mxfp8", ["quant/pv=mxfp8"]),
        ("+exp", ["+experiment="]),
        (
            "+experiment=m",
            [
                f"+experiment={name}"
                for name in (
                    "matched",
                    "mx_instability",
                    "mxfp4_products",
                    "mxfp4_recipe",
                    "mxfp8_scale_rules",
                    "mxfp8_tracks_bf16",
                )
            ],
        ),
        ("training.prec", ["training.precision="]),
        ("training.precision=fp", ["training.precision=fp16", "training.precision=fp32"]),
        ("force=", ["force=true", "force=false"]),
        ("launcher.kind=", ["launcher.kind=local", "launcher.kind=slurm"]),
        ("training.seed=", ["training.seed=1234"]),
        ("quant.linear.fp", ["quant.linear.fprop."]),
        ("quant.linear.fprop.x.fo", ["quant.linear.fprop.x.format="]),
        ("nothing.at.all", []),
        ("nothing=", []),
        ("plan --js", ["--json"]),
        ("-", ["--help", "--config-dir", "--multirun"]),
        ("verify --device ", ["cpu", "cuda"]),
        ("verify --formats mxfp8_e4m3,hifp", ["mxfp8_e4m3,hifp8"]),
        ("draw --formats ", ["png", "pdf", "svg"]),
        ("draw RUN --formats png,s", ["png,svg"]),
        ("captures RUN pa", ["paths.root="]),
        ("draw RUN pa", ["paths.root="]),
        ("requantise RUN pa", ["paths.root="]),
        ("captures RUN --to s", ["safetensors"]),
        ("list ", [*KINDS]),
        ("help ", [*all_verbs()]),
        ("completion ", [*SHELLS]),
        ("doctor ", []),
        ("-cd mine li", ["list"]),
        ("plan 'quant=bf", ["quant=bf16"]),
        ("-cd ", []),
        ("quant=bf16 pla", []),
        ("retry launcher.time", ["launcher.time_min=", "launcher.timeout_min="]),
        ("resume parallel.ten", ["parallel.tensor="]),
        ("resume code=c", ["code=current"]),
        ("compare RUN measure=p", ["measure=perplexity"]),
        ("export RUN for", ["format=hf", "format=megatron_lm"]),
        ("plan device=h1", ["device=h100"]),
        ("device=h1", []),
    ],
)
def test_words_at_the_cursor_are_completed(line: str, expected: list[str]) -> None:
    assert words(line) == expected


def test_first_word_is_a_verb_a_group_or_a_section() -> None:
    candidates = words("")
    assert set(all_verbs()) < set(candidates)
    assert {"model=", "training=", "quant/qk=", "training.", "+experiment="} < set(candidates)
    assert not set(all_verbs()) & set(words("quant=bf16 "))


def test_all_schemes_are_choices() -> None:
    assert {f"quant={name}" for name in SCHEMES} < set(words("quant="))
    assert words("verify --formats ") == sorted(known_names())


def test_runs_and_sweeps_are_completed_by_verbs_about_runs(runs: Path) -> None:
    assert words("compare ")[:3] == [RUN, OTHER, "20260101"]
    assert words("logs llama32-1b_wikipedia_F") == [RUN]
    assert words("draw FA_mx") == [RUN], "a part of a name that one run has"
    assert words("draw wikipedia") == [], "a part that two have"
    assert words("status paths.root=elsewhere ") == ["paths.root="]


def test_own_choices_are_completed_with_their_folder(runs: Path) -> None:
    assert words("-cd mine quant=ap") == ["quant=april/my_scheme"]
    assert words("--config-dir=mine plan quant=ap") == ["quant=april/my_scheme"]
    assert candidate_lines("quantexp -cd mine quant=ap") == "quant=april/my_scheme\tMy own.\n"


def test_long_descriptions_are_cut() -> None:
    line = candidate_lines("quantexp +experiment=ten")
    assert line.endswith("...\n")
    assert len(line.partition("\t")[2]) <= 61


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell)
    assert "__complete" in text


@pytest.mark.parametrize(("arguments", "name"), [([], "nothing"), (["csh"], "csh")])
def test_another_shell_is_misuse(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", *arguments])
    assert ended.value.code == 2
    message = (
        f"quantexp: completion takes bash, zsh or fish, got {name}; see quantexp help completion"
    )
    assert capsys.readouterr().err == f"{message}\n"


def test_no_torch_and_no_hydra_is_imported() -> None:
    code = (
        "import sys; from quantexp.cli.main import main; main(['__complete', 'quantexp quant=']); "
        "assert not {'torch', 'numpy', 'hydra', 'omegaconf', 'matplotlib'} & set(sys.modules), sys.modules"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


# In the shells themselves.


def in_shell(shell: str, code: str, cwd: Path) -> list[str]:
    """The lines that a shell prints for some code, with this environment's quantexp on its path."""
    if shutil.which(shell) is None:
        reason = f"{shell} is not installed: tests/shells/setup.sh"
        if os.environ.get("QUANTEXP_REQUIRE_SHELLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    bin_ = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(cwd)}
    flags = {"bash": ["--norc", "-c"], "zsh": ["-f", "-c"], "fish": ["--no-config", "-c"]}
    process = subprocess.run(
        [shell, *flags[shell], code], capture_output=True, text=True, env=environment, cwd=cwd
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return process.stdout.splitlines()


BASH = """
eval "$(quantexp completion bash)"
complete -p quantexp > /dev/null || exit 3
for COMP_LINE in {lines}; do
    COMP_POINT=${{#COMP_LINE}} COMP_WORDS=(quantexp)
    _quantexp
    printf '%s|' "${{COMPREPLY[@]}}"; echo
done
"""


def test_bash_replaces_what_follows_the_last_break(runs: Path) -> None:
    lines = "'quantexp pl' 'quantexp training.precision=fp' \"quantexp 'quant=FA_linear_mxfp8\" 'quantexp logs FA_m'"
    assert in_shell("bash", BASH.format(lines=lines), runs) == [
        "plan|",
        "fp16|fp32|",
        "quant=FA_linear_mxfp8|",
        f"{RUN}|",
    ]


ZSH = """
compdef() {{ :; }}
eval "$(quantexp completion zsh)"
compadd() {{ local last; for last; do :; done; print -r -- ${{(P)last}}; }}
words=(quantexp {before} '{prefix}') CURRENT=$#words PREFIX='{prefix}'
_quantexp
"""


@pytest.mark.parametrize(
    ("before", "prefix", "expected"),
    [
        ("", "pl", ["plan"]),
        ("", "training.precision=fp", ["training.precision=fp16 training.precision=fp32"]),
        ("logs", "FA_m", [RUN]),
        ("", "mod", ["model= model."]),
    ],
)
def test_zsh_adds_whole_words(before: str, prefix: str, expected: list[str], runs: Path) -> None:
    assert in_shell("zsh", ZSH.format(before=before, prefix=prefix), runs) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("quantexp pl", ["plan\tshow what would run: precision map, memory, time; run not..."]),
        (
            "quantexp training.precision=fp",
            ["training.precision=fp16", "training.precision=fp32"],
        ),
        ("quantexp -cd min", ["mine/"]),
        ("quantexp dataset.path=min", ["dataset.path=mine/"]),
    ],
)
def test_fish_completes_words_and_files(line: str, expected: list[str], runs: Path) -> None:
    code = f'quantexp completion fish | source; complete -C "{line}"'
    assert [candidate.strip() for candidate in in_shell("fish", code, runs)] == expected
