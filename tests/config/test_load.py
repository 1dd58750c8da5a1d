"""Strict loading: every kind of user's mistake, and the round trip of config.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from omegaconf import OmegaConf

from quantexp.config.compose import compose, configuration
from quantexp.config.load import from_plain, load, plain, read, save, unknown_key
from quantexp.errors import ConfigError
from quantexp.launch.reuse import read_capture
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


# The table of facts/hydra.md.


def test_unknown_choice_lists_the_options() -> None:
    message = refusal("quant=FA_linear_mxfp9")
    assert message.startswith(
        "quant=FA_linear_mxfp9: no such choice; did you mean FA_linear_mxfp4, FA_linear_mxfp8 or more/FA_linear_mxfp6? "
        "available: "
    )
    assert "FA_linear_mxfp8, FA_mxfp4, FA_mxfp8, bf16, linear_hifp8" in message


def test_misspelt_key_is_named_with_its_neighbour() -> None:
    message = refusal("quant.linear.formt=x")
    assert message.startswith("unknown key quant.linear.formt; did you mean format? allowed in ")
    assert "quant.linear: format, block, scale_rule" in message


def test_misspelt_key_with_a_plus_is_refused() -> None:
    message = refusal("+quant.linear.formt=x")
    assert message.startswith("unknown key quant.linear.formt; did you mean format?")


def test_value_of_the_wrong_type_is_refused_at_composition() -> None:
    message = refusal("training.lr=abc")
    assert message == "training.lr must be a number, got 'abc'"


def test_typo_in_the_users_own_yaml_names_the_file_and_the_key(mine: Callable[..., Path]) -> None:
    folder = mine("quant/own", OWN + "linear:\n  formt: bf16\n")
    message = refusal("quant=own", config_dir=folder)
    assert message.startswith(f"{folder}/quant/own.yaml: unknown key quant.linear.formt; did you ")


def test_value_out_of_range_is_refused_with_key_value_and_range() -> None:
    message = refusal("quant=linear_mxfp8", "quant.linear.block=24")
    assert message == "quant.linear.block must be a power of two, got 24"


# More of the same kind.


@pytest.mark.parametrize("plus", ["", "+"])
def test_unknown_group_is_named_at_the_root(plus: str) -> None:
    message = refusal(f"{plus}trainingg.lr=1")
    assert message.startswith("unknown key trainingg; did you mean training? allowed in the root: ")


def test_unknown_enum_value_lists_the_options() -> None:
    message = refusal("training.precision=fp8")
    assert message == ("training.precision must be one of bf16, fp16, fp32, got 'fp8'")


def test_misspelt_key_of_a_rule_is_named_as_one_of_a_rule() -> None:
    message = refusal("quant.rules=[{layers:[0],formt:bf16}]")
    assert message.startswith("unknown key quant.rules[].formt; did you mean format? allowed in ")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "capture.rules=[{values:x}]",
            "capture.rules[].values must be one of before, after, both, got 'x'",
        ),
        (
            "capture.rules=[{sample_count:a}]",
            "capture.rules[].sample_count must be a whole number, got 'a'",
        ),
        ("capture.rules=[{layers:3}]", "capture.rules[].layers must be a list, in brackets"),
        ("capture.rules=[{},3]", "capture.rules[1] must be keys with values, in braces"),
        ("quant.rules=3", "quant.rules must be a list, in brackets"),
    ],
)
def test_wrong_value_of_a_rule_is_named_with_its_position(override: str, words: str) -> None:
    assert refusal(override) == words


def test_wrong_type_in_the_users_own_yaml_names_the_file(mine: Callable[..., Path]) -> None:
    folder = mine("training/own", "name: own\nlr: abc\n")
    message = refusal("training=own", config_dir=folder)
    assert message.startswith(
        f"{folder}/training/own.yaml: training.lr must be a number, got 'abc'"
    )


def test_misspelt_rule_in_the_users_own_yaml_names_the_file(mine: Callable[..., Path]) -> None:
    folder = mine("quant/own", OWN + "rules:\n  - {layrs: [0], format: bf16}\n")
    message = refusal("quant=own", config_dir=folder)
    assert message.startswith(
        f"{folder}/quant/own.yaml: unknown key quant.rules[].layrs; did you mean layers?"
    )


def test_unknown_choice_in_the_users_own_yaml_names_the_file(mine: Callable[..., Path]) -> None:
    folder = mine("quant/own", OWN.replace("mxfp8", "mxfp9"))
    message = refusal("quant=own", config_dir=folder)
    assert message == (
        f"{folder}/quant/own.yaml: quant/linear=mxfp9: no such choice; did you mean mxfp4, mxfp6 or mxfp8? "
        "available: fp8, hifp8, mxfp4, mxfp6, mxfp8, none, nvfp4"
    )


def test_yaml_that_does_not_parse_names_the_file_and_the_line(mine: Callable[..., Path]) -> None:
    folder = mine("quant/own", OWN + "linear: {a: b\n")
    message = refusal("quant=own", config_dir=folder)
    assert f'in "{folder}/quant/own.yaml", line 6' in message
    assert message.endswith("mend the YAML")


def test_missing_value_is_reported_with_a_remedy(mine: Callable[..., Path]) -> None:
    folder = mine("model/own", "name: own\nnum_layers: 1\n")
    message = refusal("model=own", config_dir=folder)
    assert message == "model.hidden_size has no value; give model.hidden_size=..."


def test_interpolation_that_leads_nowhere_names_the_key() -> None:
    assert refusal("training.lr=${nope}") == "training.lr: Interpolation key 'nope' not found"


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


# config.yaml.


def test_config_yaml_reads_back_as_the_same_experiment(tmp_path: Path) -> None:
    rules = "quant.rules=[{layers:[0],iterations:[1,null],format:bf16}]"
    experiment = compose(["quant=FA_linear_hifp8", "training=fast", rules], None, {})
    save(experiment, tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml") == experiment


@pytest.mark.parametrize(
    "word", ["1e5", "1_000", "inf", "null", "yes", "0x1f", "a: b", "# c", "ü\n'\""]
)
def test_words_that_look_like_something_else_stay_words(word: str, tmp_path: Path) -> None:
    experiment = compose(["training=fast"], None, {})
    experiment.dataset.split = word
    file = tmp_path / "config.yaml"
    save(experiment, file)
    assert OmegaConf.load(file).dataset.split == word


def test_config_yaml_has_the_schemes_name(tmp_path: Path) -> None:
    save(compose(["quant/pv=hifp8"], None, {}), tmp_path / "config.yaml")
    assert "  name: pv_hifp8\n" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ", line 2: did not find expected node content"),
        ("- 1\n", " is not a configuration; run the experiment again"),
        ("a: &b [1]\nc: *b\n", ", line 2: it must have no alias, got \\*b"),
        ("a: " + "9" * 5000, ", line 1: a number must have at most 400 digits, got 5000"),
    ],
)
def test_broken_config_yaml_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml{words}"):
        read(tmp_path / "config.yaml")


def test_missing_config_yaml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read: .*No such file"):
        read(tmp_path / "config.yaml")


def test_config_yaml_of_another_version_names_the_key(tmp_path: Path) -> None:
    save(compose([], None, {}), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text + "elsewhere: 1\n")
    with pytest.raises(ConfigError, match="unknown key elsewhere; allowed in the root: model, "):
        read(tmp_path / "config.yaml")


def test_config_yaml_out_of_range_is_refused(tmp_path: Path) -> None:
    experiment = compose([], None, {})
    experiment.training.iterations = 0
    save(experiment, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"training\.iterations must be at least 1, got 0"):
        read(tmp_path / "config.yaml")


def test_plain_configuration_reads_back_as_the_same_experiment() -> None:
    for words in (["quant=more/FA_full_mxfp8", "capture=tensors"], ["launcher=slurm"]):
        experiment = compose(words, None, {})
        container = OmegaConf.to_container(OmegaConf.structured(experiment), enum_to_str=True)
        assert plain(experiment) == container
        assert from_plain(json.loads(json.dumps(plain(experiment)))) == experiment


def test_plain_configuration_out_of_range_is_refused() -> None:
    content = plain(compose([], None, {}))
    content["training"]["iterations"] = 0
    with pytest.raises(ConfigError, match=r"training\.iterations must be at least 1, got 0"):
        from_plain(content)


def test_plain_configuration_with_an_unknown_key_is_refused() -> None:
    content = plain(compose(["launcher=slurm"]))
    content["launcher"]["nodles"] = 2
    with pytest.raises(ConfigError, match=r"unknown key launcher\.nodles"):
        from_plain(content)


def test_capture_of_a_run_folder_equals_that_of_its_whole_configuration(tmp_path: Path) -> None:
    save(compose(["training=fast", "capture.control_iter=0"], None, {}), tmp_path / "config.yaml")
    assert read_capture(tmp_path / "config.yaml") == read(tmp_path / "config.yaml").capture


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ", line 2: did not find"),
        ("- 1\n", " must hold keys with values, got list"),
        ("a: 1\n", " cannot be read: 'capture'"),
        ("capture: {level: all}\n", " cannot be read: Invalid value 'all'"),
    ],
)
def test_broken_capture_of_a_run_folder_is_refused_by_name(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml{words}"):
        read_capture(tmp_path / "config.yaml")


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


@pytest.mark.parametrize(
    ("first", "second"),
    [("training.lr=1", "training.lr=1.5"), ("training.seed=1", "training.seed=1234")],
)
def test_different_sections_are_not_confused(first: str, second: str) -> None:
    key = first.split("=")[0].split(".")[1]
    values = [getattr(compose([word], None, {}).training, key) for word in (first, second, first)]
    assert values == [float(word.split("=")[1]) for word in (first, second, first)]
    assert len({type(value) for value in values}) == 1


@pytest.mark.parametrize("key", ["trainig: {lr: 1}", "force: {a: 1}", "sweep: {}"])
def test_config_yaml_with_a_wrong_section_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.yaml").write_text(key + "\n")
    with pytest.raises(ConfigError, match=f"(unknown key )?{key.split(':')[0]}"):
        read(tmp_path / "config.yaml")


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
