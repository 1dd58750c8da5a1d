"""Every refusal of `validate`, by its message."""

from __future__ import annotations

import copy
import math
import re

import pytest

from quantexp.config.compose import compose
from quantexp.config.validate.experiment import validate
from quantexp.errors import ConfigError
from quantexp.schema import CaptureLevel, Experiment, Rule, TriggerConfig


@pytest.fixture(scope="module")
def valid() -> Experiment:
    return compose(["quant=linear_mxfp8", "model.num_layers=2"], None, {})


def refusal(valid: Experiment, **values: object) -> str:
    """The message for an experiment with these values (`training__lr`)."""
    experiment = copy.deepcopy(valid)
    for key, value in values.items():
        node: object = experiment
        *path, last = key.split("__")
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)
    with pytest.raises(ConfigError) as caught:
        validate(experiment)
    return str(caught.value)


def test_valid_experiment_passes(valid: Experiment) -> None:
    validate(valid)


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("model.num_layers", 1),
        ("model.hidden_size", 1),
        ("model.ffn_hidden_size", 1),
        ("model.num_attention_heads", 1),
        ("model.num_query_groups", 1),
        ("model.head_dim", 1),
        ("model.vocab_size", 1),
        ("model.max_sequence_length", 1),
        ("model.rotary_base", 1),
        ("training.seq_length", 1),
        ("training.micro_batch_size", 1),
        ("training.global_batch_size", 1),
        ("training.iterations", 1),
        ("training.max_nonfinite_iterations", 1),
        ("training.warmup_iterations", 0),
        ("training.seed", 0),
        ("capture.first_iteration", 1),
        ("capture.control_iter", 0),
        ("capture.collect_micro_batches", 0),
        ("launcher.num_threads", 1),
        ("launcher.num_processes", 0),
    ],
)
def test_count_below_its_least_is_refused(valid: Experiment, key: str, least: int) -> None:
    message = refusal(valid, **{key.replace(".", "__"): least - 1})
    assert message == f"{key} must be at least {least}, got {least - 1}"


@pytest.mark.parametrize(
    "key",
    [
        "model.norm_epsilon",
        "model.init_std",
        "model.rope_scaling_factor",
        "training.lr",
        "training.adam_eps",
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_value_that_must_be_positive_is_checked(valid: Experiment, key: str, value: float) -> None:
    message = refusal(valid, **{key.replace(".", "__"): value})
    assert message == f"{key} must be a positive number, got {value}"


@pytest.mark.parametrize("key", ["min_lr", "weight_decay", "clip_grad"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_negative_value_is_refused(valid: Experiment, key: str, value: float) -> None:
    message = refusal(valid, **{f"training__{key}": value})
    assert message == f"training.{key} must be a number of at least 0, got {value}"


@pytest.mark.parametrize("key", ["adam_beta1", "adam_beta2"])
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_adams_betas_lie_below_one(valid: Experiment, key: str, value: float) -> None:
    message = refusal(valid, **{f"training__{key}": value})
    assert message == f"training.{key} must lie in [0, 1), got {value}"


@pytest.mark.parametrize("value", [0.5, 0.0, 3.0, math.inf, math.nan])
def test_loss_scale_is_a_power_of_two(valid: Experiment, value: float) -> None:
    message = refusal(valid, training__initial_loss_scale=value)
    assert message == (
        f"training.initial_loss_scale must be a power of two of at least 1, got {value}"
    )


def test_query_groups_divide_the_heads(valid: Experiment) -> None:
    message = refusal(valid, model__num_query_groups=5)
    assert message == ("model.num_query_groups must divide model.num_attention_heads=32, got 5")


def test_head_dim_is_even(valid: Experiment) -> None:
    message = refusal(valid, model__head_dim=63)
    assert message == "model.head_dim must be even for the rotary embedding, got 63"


def test_warmup_ends_before_training_does(valid: Experiment) -> None:
    message = refusal(valid, training__iterations=10, training__warmup_iterations=10)
    assert message == (
        "training.warmup_iterations must be less than training.iterations=10, got 10; take "
        "training.warmup_iterations=1"
    )


def test_held_iterations_leave_some_to_train(valid: Experiment) -> None:
    message = refusal(valid, training__iterations=150, training__held_iterations=150)
    assert message == (
        "training.held_iterations must be less than the 150 iterations of the run, got 150"
    )


def test_batch_is_made_of_whole_micro_batches(valid: Experiment) -> None:
    message = refusal(valid, training__global_batch_size=6, training__micro_batch_size=4)
    assert message == (
        "training.global_batch_size must be a multiple of training.micro_batch_size=4, got 6; take "
        "training.global_batch_size=8"
    )


def test_learning_rate_does_not_rise(valid: Experiment) -> None:
    message = refusal(valid, training__lr=0.25, training__min_lr=0.5)
    assert message == (
        "training.min_lr must be at most training.lr=0.25, got 0.5; take training.min_lr=0.025"
    )


def test_triggers_need_a_ring(valid: Experiment) -> None:
    trigger = TriggerConfig(deviations=5.0)
    assert refusal(valid, capture__trigger=trigger) == (
        "capture.trigger needs capture.ring=N, the statistics that it writes; add it, or drop the trigger"
    )
    assert refusal(valid, capture__ring=7) == "capture.ring must be at least 8, got 7"
    too_short = TriggerConfig(window=15)
    assert refusal(valid, capture__ring=8, capture__trigger=too_short) == (
        "capture.trigger.window must be at least 16, got 15"
    )
    of_more = TriggerConfig(share=1.5)
    assert refusal(valid, capture__ring=8, capture__trigger=of_more) == (
        "capture.trigger.share must be at most 1, got 1.5"
    )


@pytest.mark.parametrize(
    "values", [{"level": CaptureLevel.off}, {"control_iter": 0}], ids=["nothing", "everything"]
)
def test_stopping_after_the_capture_needs_a_capture_that_ends(
    valid: Experiment, values: dict[str, object]
) -> None:
    capture = {f"capture__{key}": value for key, value in values.items()}
    message = refusal(valid, capture__stop_after_capture=True, **capture)
    assert message.startswith("capture.stop_after_capture needs something that ends: capture=tens")


@pytest.mark.parametrize("key", ["model", "dataset", "quant"])
@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "two words"])
def test_name_of_a_folder_must_be_plain(valid: Experiment, key: str, name: str) -> None:
    message = refusal(valid, **{f"{key}__name": name})
    assert message == (
        f"{key}.name must be letters, digits and . _ + ~ - (it names a folder), got {name!r}"
    )


def test_sequence_fits_the_model(valid: Experiment) -> None:
    message = refusal(valid, model__max_sequence_length=64, training__seq_length=65)
    assert message == "training.seq_length must be at most model.max_sequence_length=64, got 65"


@pytest.mark.parametrize("block", [0, -32, 24])
def test_block_is_a_power_of_two(valid: Experiment, block: int) -> None:
    message = refusal(valid, quant__linear__block=block)
    assert message == f"quant.linear.block must be a power of two, got {block}"


def test_slots_own_key_is_named(valid: Experiment) -> None:
    message = refusal(valid, quant__linear__wgrad__g__block=24)
    assert message == "quant.linear.wgrad.g.block must be a power of two, got 24"


def test_rules_are_checked(valid: Experiment) -> None:
    message = refusal(valid, quant__rules=[Rule(layers=[7])])
    assert message == "quant.rules[0].layers must lie between -2 and 1 for 2 layers, got 7"


def test_rule_of_a_later_iteration_is_checked_too(valid: Experiment) -> None:
    rule = Rule(iterations=[500, None], sites=["linear"], block=24)
    message = refusal(valid, quant__rules=[rule])
    assert re.fullmatch(r"quant\.rules\[0\]\.block must be a power of two, got 24", message)


def test_global_batch_that_does_not_divide_over_the_processes_is_refused(valid: Experiment) -> None:
    sizes = {"training__global_batch_size": 6, "training__micro_batch_size": 2}
    assert refusal(valid, **sizes, launcher__num_processes=2) == (
        "training.global_batch_size must be a multiple of training.micro_batch_size x launcher.num_processes = "
        "2 x 2 = 4, got 6; take training.global_batch_size=8"
    )


def test_no_time_to_wait_for_other_processes_is_refused(valid: Experiment) -> None:
    message = refusal(valid, launcher__timeout_min=0.0)
    assert message == "launcher.timeout_min must be a positive number, got 0.0"


def test_more_rules_than_can_be_tried_on_every_layer_are_refused(valid: Experiment) -> None:
    rules = [Rule(layers=[0], format="bf16")] * 500_001
    assert refusal(valid, quant__rules=rules) == (
        "quant.rules times the layers and experts of the model must be at most 1,000,000, got 500,001 x 2"
    )
