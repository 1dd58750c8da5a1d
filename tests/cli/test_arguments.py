"""The verb among the words, each verb's help, and the messages for invalid words."""

from __future__ import annotations

import shlex

import pytest

from quantexp.cli.arguments import parser_of, split_verb, top_parser
from quantexp.cli.plan_backend import device_of
from quantexp.cli.verbs import GROUPS, all_verbs
from quantexp.config.compose import compose
from quantexp.config.sweep.points import compose_points

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "verb", "rest"),
    [
        ([], None, []),
        (["a=1"], None, ["a=1"]),
        (["plan", "a=1"], "plan", ["a=1"]),
        (["-m", "plan", "a=1"], "plan", ["-m", "a=1"]),
        (["-cd", "mine", "list", "schemes"], "list", ["-cd", "mine", "schemes"]),
        (["--config-dir", "list", "plan"], "plan", ["--config-dir", "list"]),
        (["--config-dir=mine", "plan"], "plan", ["--config-dir=mine"]),
        (["--rank", "1", "logs", "RUN"], "logs", ["--rank", "1", "RUN"]),
        (["a=1", "plan"], None, ["a=1", "plan"]),
        (["draw", "plan"], "draw", ["plan"]),
    ],
)
def test_verb_is_the_first_word_that_is_neither_a_flag_nor_its_value(
    words: list[str], verb: str | None, rest: list[str]
) -> None:
    assert split_verb(words) == (verb, rest)


def test_a_flag_takes_a_value_with_every_verb_or_with_none() -> None:
    takes: dict[str, bool] = {}
    for verb in all_verbs():
        for action in parser_of(verb)._actions:
            for flag in action.option_strings:
                assert takes.setdefault(flag, action.nargs != 0) == (action.nargs != 0), flag


def test_help_lists_every_verb_once() -> None:
    assert sorted(verb for verbs in GROUPS.values() for verb in verbs) == sorted(all_verbs())


@pytest.mark.parametrize("verb", [None, *all_verbs()])
def test_help_fits_80_columns_and_has_examples(
    verb: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser_of.cache_clear()
    text = (top_parser() if verb is None else parser_of(verb)).format_help()
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert "examples:\nquantexp " in text
    parser_of.cache_clear()


@pytest.mark.parametrize(
    ("verb", "example"), [(v, e) for v, verb in all_verbs().items() for e in verb.examples]
)
def test_every_example_is_a_command(verb: str, example: str) -> None:
    first, rest = split_verb(shlex.split(example))
    assert (first or "train") == verb
    arguments = parser_of(verb).parse_intermixed_args(rest)
    if verb in ("train", "plan", "prepare") and arguments.config_dir is None:
        if getattr(arguments, "multirun", False):
            assert len(compose_points(arguments.words, None, {})) >= 10
        else:
            compose(device_of(arguments.words)[0], None, {})


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("plan", ["--jsn"], "unknown flag --jsn; did you mean --json? see quantexp help plan"),
        ("list", ["--nope"], "unknown flag --nope; see quantexp help list"),
        (
            "list",
            ["-m"],
            "list has no flag -m; it is one of train, plan, evaluate; see quantexp help list",
        ),
        ("train", ["-cd"], "--config-dir needs a value: --config-dir FOLDER; see quantexp help"),
        ("logs", ["--rank", "x"], "--rank must be a whole number, got 'x'; see quantexp help logs"),
        (
            "requantise",
            ["--sqnr=x", "DIR"],
            "--sqnr must be a number, got 'x'; see quantexp help requantise",
        ),
        (
            "verify",
            ["--device", "gpu"],
            "--device must be one of cpu, cuda, got 'gpu'; see quantexp help verify",
        ),
        ("plan", ["--json=1"], "--json takes no value, got '1'; see quantexp help plan"),
        (
            "report",
            [],
            "report needs DIR: quantexp report DIR ... [out=PATH] [paths.root=FOLDER]; see quantexp help report",
        ),
        ("doctor", ["a=1", "b"], "doctor takes no overrides, got a=1 b; see quantexp help doctor"),
    ],
)
def test_misuse_is_one_line(capsys: Captured, verb: str, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parser_of(verb).parse_intermixed_args(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"quantexp: {message}\n"


def test_version_is_printed_with_any_verb(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        parser_of("plan").parse_args(["--version"])
    assert capsys.readouterr().out.startswith("quantexp 0")
