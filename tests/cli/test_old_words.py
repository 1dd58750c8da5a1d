"""Command lines in the words of the old scripts, and the commands that answer them."""

from __future__ import annotations

import shlex

import pytest

from quantexp.cli.arguments import parser_of, split_verb
from quantexp.cli.main import main
from quantexp.cli.old_words import answer
from quantexp.config.compose import compose
from quantexp.config.sweep.points import compose_points
from quantexp.errors import ConfigError


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("quantization=mxfp8", "quant=FA_linear_mxfp8"),
        ("scheme=FA_mxfp8 training=fast", "quant=FA_mxfp8 training=fast"),
        ("quantization/linear=mxfp4", "quant=linear_mxfp4"),
        ("quantization.type=mxfp8", "quant=FA_linear_mxfp8"),
        ("quantization_format=mxfp8 --models tiny", "quant=FA_linear_mxfp8 model=tiny"),
        ("quantization.linear.fprop.x.format=mxfp4", "quant.linear.fprop.x.format=mxfp4"),
        ("-m quantization=mxfp8,none", "-m quant=FA_linear_mxfp8,bf16"),
        ("training_config=fast", "training=fast"),
        ("training-config=fast Quant-Type=hifp8", "training=fast quant=FA_linear_hifp8"),
        ("--quant-type fp16", "quant=bf16 training.precision=fp16"),
        (
            "--model llama32-1b --dataset=wikipedia --quantization FA_mxfp8",
            "model=llama32-1b dataset=wikipedia quant=FA_mxfp8",
        ),
        ("--fa-quantization qk_mxfp8", "quant=FA_mxfp8"),
        ("--fa-quantization pv_mxfp8", "quant=bf16 quant/pv=mxfp8"),
        ("--linear-quant mxfp8 --qk-quant mxfp8", "quant=FA_linear_mxfp8"),
        ("--linear_quant mxfp4 --qk_quant hifp8", "quant=bf16 quant/linear=mxfp4 quant/qk=hifp8"),
        ("quant=FA_hifp8 --linear-quant mxfp4", "quant=FA_hifp8 quant/linear=mxfp4"),
        ("--dry-run --quantization FA_mxfp8", "plan quant=FA_mxfp8"),
        ("dry-run model=tiny", "plan model=tiny"),
        ("--check", "plan"),
        ("check", "plan"),
        ("--list", "list"),
        ("--list schemes", "list schemes"),
        ("--list-models", "list models"),
        ("--mode batch --training-config fast", "-m 'quant=glob(*)' training=fast"),
        ("single tiny wikipedia FA_mxfp8", "model=tiny dataset=wikipedia quant=FA_mxfp8"),
        ("quick --model tiny", "training=fast model=tiny"),
        ("both", "training=fast analysis.auto=true"),
        ("collect --control-iter 2", "capture=tensors capture.control_iter=2"),
        ("--tensor-dir 'my dir' --tensor-save-enabled 1", "capture=tensors 'capture.dir=my dir'"),
        ("--mode visualize --tensor-dir old --output-dir draw", "draw old out=draw"),
        ("draw old --output-dir draw", "draw old out=draw"),
        ("quick_visualize", "draw RUN --only quick_analysis"),
        ("--restore", "quant=bf16"),
        (
            "run_tensor_collection.py --model llama32-1b --dataset dolma --quantization mxfp8",
            "capture=tensors model=llama32-1b dataset=dolma quant=FA_linear_mxfp8",
        ),
        ("python run_tensor_collection.py --mode batch", "-m 'quant=glob(*)' capture=tensors"),
        ("python3.11 -u -m run_tensor_collection --model tiny", "capture=tensors model=tiny"),
        (
            "bash scripts/run_single.sh tiny wikipedia FA_mxfp8",
            "model=tiny dataset=wikipedia quant=FA_mxfp8",
        ),
        ("/usr/bin/python3 ./run_tensor_draw.py --tensor-dir old", "draw old"),
        ("Run-Tensor-Draw.py --tensor_dir old --output-dir draw", "draw old out=draw"),
        ("quant_type_modifier.py --quant-type hifp8", "quant=FA_linear_hifp8"),
        ("quant_type_modifier.py --restore", "quant=bf16"),
        ("flash_attention_config.py --fa-quantization qk_mxfp4", "quant=FA_mxfp4"),
        ("train_config.py", "list presets"),
        ("python mine/train_llama.py --model tiny --dry-run", "plan model=tiny"),
        ("--seq-length 128 --train-iters 8", "training.seq_length=128 training.iterations=8"),
    ],
)
def test_old_words_are_answered_with_a_command(old: str, now: str) -> None:
    message = answer(*split_verb(shlex.split(old)))
    assert message is not None
    assert message.partition("; now it is: quantexp ")[2] == now
    verb, words = split_verb(shlex.split(now))
    arguments = parser_of(verb or "train").parse_intermixed_args(words)
    if verb in (None, "plan"):
        run = [*arguments.words, "training.warmup_iterations=0"]
        if arguments.multirun:
            assert compose_points(run, None, {})
        else:
            compose(run, None, {})


@pytest.mark.parametrize(
    "words",
    [
        "captures RUN --list",
        "logs check",
        "training=fast",
        "--nonsense",
        "--force",
        "-h",
        "train.sh",
        "python mine.py",
    ],
)
def test_our_own_words_have_no_such_answer(words: str) -> None:
    assert answer(*split_verb(shlex.split(words))) is None


def test_an_old_option_without_a_value_is_answered_with_a_placeholder() -> None:
    message = answer(None, ["--model", "--dataset", "wikipedia", "--quantization"])
    assert message is not None
    assert message.endswith(": quantexp model=MODEL dataset=wikipedia quant=QUANT")


@pytest.mark.parametrize(
    ("words", "hint"), [("--mode bach", "did you mean batch?"), ("--mode=foo", "see quantexp help")]
)
def test_a_mode_that_never_was_is_named(words: str, hint: str) -> None:
    mode = words.replace("=", " ").split()[1]
    assert answer(*split_verb(shlex.split(words))) == (
        f"--mode is a word of the old scripts, which had no mode {mode}; {hint}"
    )


def test_the_answer_is_one_line_and_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "quantexp: --model and --dry-run are words of the old scripts; now it is: quantexp plan model=tiny\n"
    )


def test_old_key_from_python_or_a_file_has_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key quantization; did you mean quant\? "):
        compose(["quantization=mxfp8"], None, {})
