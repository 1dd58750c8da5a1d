"""Strict loading: every kind of user's mistake, and the round trip of config.yaml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose

from quantexp.config.compose import compose, configuration
from quantexp.config.load import from_plain, load, read, save, unknown_key
from quantexp.errors import ConfigError
from quantexp.schema import Experiment, TokenizerKind

#: A scheme of the user's own, quantising the linear layers.
OWN = "defaults:\n  - linear: mxfp8\n  - qk: none\n  - pv: none\n  - _self_\n"


def refusal(*words: str, config_dir: Path | None = None) -> str:
    """The message that refuses a composition; always one line."""
    with pytest.raises(ConfigError) as caught:
        compose(list(words), config_dir, {})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., Path]:
    """Writes a YAML file into the user's own config-dir and returns that folder."""

    def write(name: str, text: str) -> Path:
        file = tmp_path / "mine" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path / "mine"

    return write


def is_message(actual: str, expected: str) -> bool:
    """Whether a message is the expected one, or begins with it where that ends in an ellipsis."""
    return actual.startswith(expected[:-1]) if expected.endswith("…") else actual == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["quant=FA_linear_mxfp9"],
            "quant=FA_linear_mxfp9: no such choice; did you mean FA_linear_mxfp4, FA_linear_mxfp8 or "
            "more/FA_linear_mxfp6? available: FA_hifp8, FA_linear_hifp8, FA_linear_mxfp4, FA_linear_mxfp8, FA_mxfp4, "
            "FA_mxfp8, bf16, linear_hifp8…",
        ),
        (
            ["quant.linear.formt=x"],
            "unknown key quant.linear.formt; did you mean format? allowed in quant.linear: format, block, scale_rule…",
        ),
        (["+quant.linear.formt=x"], "unknown key quant.linear.formt; did you mean format?…"),
        (["training.lr=abc"], "training.lr must be a number, got 'abc'"),
        (
            ["quant=linear_mxfp8", "quant.linear.block=24"],
            "quant.linear.block must be a power of two, got 24",
        ),
        *(
            ([word], "unknown key trainingg; did you mean training? allowed in the root: …")
            for word in ("trainingg.lr=1", "+trainingg.lr=1")
        ),
        (
            ["training.precision=fp8"],
            "training.precision must be one of bf16, fp16, fp32, got 'fp8'",
        ),
        (
            ["quant.rules=[{layers:[0],formt:bf16}]"],
            "unknown key quant.rules[0].formt; did you mean format? allowed in …",
        ),
        (["training.lr=${nope}"], "training.lr: Interpolation key 'nope' not found"),
    ],
)
def test_mistake_on_the_command_line_is_named(words: list[str], message: str) -> None:
    assert is_message(refusal(*words), message)


@pytest.mark.parametrize(
    ("choice", "text", "message"),
    [
        (
            "quant=own",
            OWN + "linear:\n  formt: bf16\n",
            "FILE: unknown key quant.linear.formt; did you …",
        ),
        (
            "training=own",
            "name: own\nlr: abc\n",
            "FILE: training.lr must be a number, got 'abc'…",
        ),
        (
            "quant=own",
            OWN + "rules:\n  - {layrs: [0], format: bf16}\n",
            "FILE: unknown key quant.rules[0].layrs; did you mean layers?…",
        ),
        (
            "quant=own",
            OWN.replace("mxfp8", "mxfp9"),
            "FILE: quant/linear=mxfp9: no such choice; did you mean mxfp4, mxfp6 or mxfp8? "
            "available: fp8, hifp8, mxfp4, mxfp6, mxfp8, none, nvfp4",
        ),
        (
            "model=own",
            "name: own\nnum_layers: 1\n",
            "model.hidden_size has no value; give model.hidden_size=...",
        ),
    ],
)
def test_mistake_in_the_users_own_yaml_is_named_with_the_file(
    mine: Callable[..., Path], choice: str, text: str, message: str
) -> None:
    name = choice.replace("=", "/")
    folder = mine(name, text)
    actual = refusal(choice, config_dir=folder)
    assert is_message(actual, message.replace("FILE", f"{folder}/{name}.yaml"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "capture.rules=[{values:x}]",
            "capture.rules[0].values must be one of before, after, both, got 'x'",
        ),
        (
            "capture.rules=[{sample_count:a}]",
            "capture.rules[0].sample_count must be a whole number, got 'a'",
        ),
        ("capture.rules=[{layers:3}]", "capture.rules[0].layers must be a list, in brackets"),
        ("capture.rules=[{},3]", "capture.rules[1] must be keys with values, in braces"),
        ("quant.rules=3", "quant.rules must be a list, in brackets"),
        (
            "quant.rules=[{},{format: bf16, iterations: [a, 3]}]",
            "quant.rules[1].iterations[0] must be a whole number, got 'a'",
        ),
        (
            "capture.rules=[{layers: [0, x]}]",
            "capture.rules[0].layers[1] must be a whole number, got 'x'",
        ),
        (
            "quant.rules=[{share: [0, [1]]}]",
            "quant.rules[0].share[1] must be one value, got the list [1]",
        ),
        (
            "quant.rules=[{iterations: [1, {a: 2}]}]",
            "quant.rules[0].iterations[1] must be one value, got the mapping {'a': 2}",
        ),
        (
            "quant.rules=[{layers: [null]}]",
            "quant.rules[0].layers[0] must have a value, got null; drop it for the default",
        ),
        (
            "capture.rules=[{layers: null}]",
            "capture.rules[0].layers must have a value, got null; drop it for the default",
        ),
        ("quant.rules=[{when: {below: x}}]", "quant.rules[0].when.below must be a number, got 'x'"),
        ("quant.rules=[{when: [a]}]", "quant.rules[0].when must be keys with values, in braces"),
        (
            "quant.rules=[{format: [mxfp8]}]",
            "quant.rules[0].format must be one value, got ['mxfp8']",
        ),
        (
            "quant.rules=[{clip_gradient: 2}]",
            "quant.rules[0].clip_gradient must be true or false, got 2",
        ),
        ("capture.rules=[{level: [off]}]", "capture.rules[0].level must be one value, got ['off']"),
        (
            "quant={rules: [{layers: [x]}]}",
            "quant.rules[0].layers[0] must be a whole number, got 'x'",
        ),
        (
            "quant.rules=[{},{parts: [{take: mean}, {number: x}]}]",
            "quant.rules[1].parts[1].number must be a whole number, got 'x'",
        ),
        ("dataset.label=[a]", "dataset.label must be one value, got ['a']"),
        ("capture.level={a: 1}", "capture.level must be one value, got {'a': 1}"),
    ],
)
def test_wrong_value_of_a_rule_is_named_with_its_position(override: str, words: str) -> None:
    assert refusal(override) == words


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("[{}, {layers: [x]}]", "quant.rules[1].layers[0] must be a whole number, got 'x'"),
        ("[{parts: [{tak: mean}]}]", "unknown key quant.rules[0].parts[0].tak; did you mean take?"),
    ],
)
def test_a_rule_of_a_file_and_of_a_recorded_run_is_named_with_its_position(
    mine: Callable[..., Path], rules: str, words: str
) -> None:
    folder = mine("quant/own", f"{OWN}rules: {rules}\n")
    file = folder / "quant" / "own.yaml"
    assert refusal("quant=own", config_dir=folder).startswith(f"{file}: {words}")
    with pytest.raises(ConfigError) as caught:
        from_plain({"quant": {"rules": yaml.safe_load(rules)}})
    assert str(caught.value).startswith(words)


def test_yaml_that_does_not_parse_names_the_file_and_the_line(mine: Callable[..., Path]) -> None:
    folder = mine("quant/own", OWN + "linear: {a: b\n")
    message = refusal("quant=own", config_dir=folder)
    assert f'in "{folder}/quant/own.yaml", line 6' in message
    assert message.endswith("mend the YAML")


def test_key_below_a_value_is_unknown_without_a_hint() -> None:
    assert unknown_key("training.lr.more") == "unknown key training.lr.more"
    assert unknown_key("nope.more") == "unknown key nope.more"
    of_mapping = "unknown key quant.formats.x; write +quant.formats.x=... to add it"
    assert unknown_key("quant.formats.x") == of_mapping


def test_sample_brings_label_tokenizer_and_vocabulary() -> None:
    experiment = compose(["training=fast"], None, {})
    assert experiment.dataset.label == "wikipedia (built-in sample)"
    assert experiment.dataset.tokenizer is TokenizerKind.byte
    assert experiment.model.vocab_size == 257


def test_path_takes_precedence_over_the_sample() -> None:
    experiment = compose(["training=fast", "dataset.path=/data/wiki"], None, {})
    assert not experiment.dataset.sample
    assert experiment.dataset.label == "wikipedia"
    assert experiment.dataset.tokenizer is TokenizerKind.huggingface
    assert experiment.model.vocab_size == 128256


def test_load_returns_the_schema_and_drops_hydras_own_part() -> None:
    with configuration(None):
        config = hydra_compose("config", return_hydra_config=True)
    assert "hydra" in config
    assert isinstance(load(config), Experiment)


def test_loading_twice_gives_two_experiments_that_share_nothing() -> None:
    with configuration(None):
        config = hydra_compose("config", ["quant=linear_mxfp8"], return_hydra_config=True)
        one, other = load(config), load(config)
    assert one == other
    one.quant.linear.fprop.x.block = 16
    one.training.seed = 1
    assert (other.quant.linear.fprop.x.block, other.training.seed) == (None, 1234)


def test_sweep_is_no_key_of_a_run(tmp_path: Path) -> None:
    save(compose([], None, {}), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text + "sweep: {seeds: 2}\n")
    with pytest.raises(
        ConfigError, match=r"unknown key sweep; allowed in the root: model, .*code$"
    ):
        read(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.vocab_size=1000", "model.vocab_size=1000 cannot hold with the built-in sample"),
        ("dataset.tokenizer=huggingface", "dataset.tokenizer=huggingface cannot hold with the"),
        (
            "dataset.tokenizer_path=/nope",
            "dataset.tokenizer_path=/nope cannot hold with the built-in",
        ),
        (
            "dataset.source=texts.jsonl",
            "dataset.source=texts.jsonl is text for `quantexp prepare`, which a run does not read",
        ),
        ("dataset.label=x", "dataset.label follows from the dataset and cannot be set, got 'x'"),
        ("training.iterations=1.5", "training.iterations must be a whole number, got '1.5'"),
        *(
            (
                f"quant.linear={{format: nvfp4, pre_scale: {value}}}",
                f"quant.linear.pre_scale must be true, false or a number of at least 0.75 and below 1, got {shown}",
            )
            for value, shown in (("half", "'half'"), ("2", "'2'"), ("0.5", "0.5"), ("1.0", "1.0"))
        ),
        ("force=perhaps", "force must be true or false, got 'perhaps'"),
        ("dataset.split=abc", "dataset.split must be one to three weights"),
        ("dataset.split='0,1'", "training above 0, got '0,1'"),
    ],
)
def test_override_without_effect_or_of_the_wrong_type_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["training=fast", override])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
