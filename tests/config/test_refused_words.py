"""Overrides that no composition accepts, with the suggestion in each message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError


def test_missing_config_dir_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir must be a folder, got '.*nowhere'"):
        compose([], tmp_path / "nowhere", {})


@pytest.mark.parametrize("word", ["a b=c", "quant={a", "quant=[bf16"])
def test_unreadable_override_is_refused_with_a_remedy(word: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^cannot read the override '.*': .*write \S+="
    ) as caught:
        compose([word], None, {})
    assert "\n" not in str(caught.value)


def test_value_that_can_only_be_text_works_as_it_is_typed() -> None:
    words = ["dataset.path=/d", "dataset.tokenizer_path=/t", "dataset.eod=<|endoftext|>"]
    assert compose(words, None, {}).dataset.eod == "<|endoftext|>"


@pytest.mark.parametrize("group", ["training", "model"])
def test_deleted_group_that_another_one_follows_is_refused_in_one_line(group: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"~{group}"], None, {})
    assert str(caught.value) == f"{group} has no choice; give {group}=NAME, or drop ~{group}"


def test_deleted_key_is_refused_in_our_words() -> None:
    with pytest.raises(
        ConfigError, match=r"~training\.lr cannot be deleted: every key has a value"
    ):
        compose(["~training.lr"], None, {})


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("iterations=5", "did you mean training.iterations or capture.iterations?"),
        ("lr=1", "did you mean training.lr?"),
        ("modl=tiny", "did you mean model?"),
        ("qk=mxfp8", "did you mean quant/qk?"),
        ("quant/lin=mxfp4", "did you mean quant/linear?"),
        ("quant=FA_linear_mxpf8", "did you mean FA_linear_mxfp8?"),
        ("quant=FA_full_mxfp8", "did you mean more/FA_full_mxfp8?"),
        ("quant=linear_nvfp4_recpe", "did you mean more/linear_nvfp4_recipe?"),
        ("training=fsat", "did you mean fast?"),
        ("launcher.kind=slrm", "did you mean slurm?"),
    ],
)
def test_mistyped_key_group_or_choice_is_refused_with_a_suggestion(
    word: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([word], None, {})
    assert suggestion in str(caught.value)


@pytest.mark.parametrize(
    ("word", "meanings"),
    [
        ("quant=mxfp8", "FA_mxfp8, linear_mxfp8 or FA_linear_mxfp8"),
        ("quant=hifp8", "FA_hifp8, linear_hifp8 or FA_linear_hifp8"),
        (
            "quant=nvfp4",
            "more/FA_full_nvfp4, more/FA_linear_nvfp4, more/linear_nvfp4 or more/te_nvfp4",
        ),
    ],
)
def test_format_in_place_of_a_scheme_is_refused_with_the_schemes(word: str, meanings: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([word], None, {})
    assert str(caught.value) == f"{word} may mean {meanings}; choose one (quantexp list schemes)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["training.lr=1e1", "training.min_lr=2e1"],
            "training.min_lr must be at most training.lr=1e1, got 2e1; take training.min_lr=1",
        ),
        (
            ["training.iterations=null"],
            "training.iterations must have a value, got null; drop it for the default",
        ),
        (["training.iterations=1e9"], "training.iterations must be a whole number, got '1e9'"),
    ],
)
def test_message_has_a_number_as_it_was_typed(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words, None, {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "words",
    [
        ["training.iterations=1"],
        ["training.iterations=3", "training.lr_schedule=wsd"],
        ["training.global_batch_size=7", "evaluation.every=1", "evaluation.samples=5"],
        ["training.micro_batch_size=3", "launcher.num_processes=2", "launcher.nodes=1"],
        ["training.lr=1e-7"],
    ],
    ids=" ".join,
)
def test_proposed_value_works(words: list[str]) -> None:
    """One key that contradicts others of a preset: the command works with the values that the messages propose."""
    proposed: list[str] = []
    for _ in range(3):
        try:
            compose(["training=fast", *words, *proposed], None, {})
        except ConfigError as error:
            (value,) = re.findall(r"; take (\S+=\S+)$", str(error))
            proposed.append(value)
    assert proposed
    compose(["training=fast", *words, *proposed], None, {})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "quant=bf16,FA_mxfp8",
            "quant=bf16,FA_mxfp8 holds several values: add -m to run them all, or write quant=[a,b] for a list and "
            "quant='a,b' for text",
        ),
        ("quant=glob(*)", "quant=glob(*) holds several values: add -m to run them all"),
        ("training.seed=range(1,4)", "training.seed=range(1,4) holds several values: add -m to"),
        ("sweep.seeds=3", "sweep.seeds is for a sweep, got 3; add -m, or drop it"),
        ("sweep.seeds=1,2", "sweep.seeds=1,2 holds several values: add -m to run them all"),
        ("sweep.points=p.yaml", "sweep.points is for a sweep, got p.yaml; add -m, or drop it"),
        ("sweep.first={quant:bf16}", "sweep.first is for a sweep, got {'quant': 'bf16'}; add"),
        ("sweep.exclude=[{quant:bf16}]", "sweep.exclude is for a sweep, got [{'quant': 'bf16'}]"),
        ("sweep.zip=[a,b]", "sweep.zip is for a sweep, got ['a', 'b']; add -m, or drop it"),
        (
            "+sweep.sed=1",
            "unknown key sweep.sed; did you mean seeds? allowed in sweep: zip, points, ",
        ),
    ],
)
def test_swept_word_is_refused_without_the_flag(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([word], None, {})
    assert str(caught.value).startswith(message)


def test_sweep_of_a_yaml_file_is_refused_without_the_flag(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra: {sweeper: {params: {quant: glob(*)}}}\n"
    (tmp_path / "experiment" / "all.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"hydra\.sweeper\.params is for a sweep, got \{'quant': 'g"
    ):
        compose(["+experiment=all"], tmp_path, {})


def test_group_without_a_choice_says_how_to_add_one() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=ten_schemes"], None, {})
    assert str(caught.value) == (
        "experiment: there is no choice to replace; to add one, write +experiment=ten_schemes"
    )


@pytest.mark.parametrize("word", ["model.mla.kv_lora_rank=3", "model.moe={num_experts: 4}"])
def test_keys_of_a_part_that_the_model_lacks_are_refused(word: str) -> None:
    message = (
        r"the chosen model has no such part: model\.mla, model\.mla\.yarn and model\.moe are null"
    )
    with pytest.raises(ConfigError, match=message):
        compose([word], None, {})


def test_an_unknown_key_of_a_part_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown key model\.mla\.kv_lora_ranx; did you mean kv_lora_rank\? allowed in model\.mla: q_lora_rank, ",
    ):
        compose(["model=deepseek2_lite", "model.mla.kv_lora_ranx=3"], None, {})
