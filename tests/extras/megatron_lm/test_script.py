"""The unmodified pretrain_gpt.py of each release, and the installed megatron.training, on a CPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture.reader import open_capture
from quantexp.extras.megatron_lm.described import experiment_of
from quantexp.quant.scheme import SCHEMES
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import read_provenance
from quantexp.runs.status import State, read_status
from quantexp.training.megatron.session import session
from quantexp.training.megatron.trainer import train
from tests.extras.megatron_lm.arguments import llama
from tests.extras.megatron_lm.checkout import SPEC, run_script
from tests.extras.megatron_lm.runs import lines, proof, quantised
from tests.training.megatron.test_trainer import RecordingObserver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_ONE = ["--train-iters", "1"]
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 192 --moe-aux-loss-coeff 0 "
    "--moe-router-load-balancing-type none --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
)
_LATENT = (
    "--multi-latent-attention --kv-lora-rank 48 --qk-head-dim 24 --qk-pos-emb-head-dim 16 --v-head-dim 24 "
    "--qk-layernorm --rope-type rope"
)


def test_bf16_equals_the_stock_script_to_the_last_digit(
    source: Path, version: str, tmp_path: Path
) -> None:
    stock = run_script(source, tmp_path / "stock", [])
    run = RunDir(tmp_path / "run")
    ours = quantised(run, tmp_path / "ours", source, "bf16", [])
    assert len(stock.curve) == 3
    assert ours.curve == stock.curve
    for line in lines(run)[::2]:  # 0.16 prints the mean of the first two lines in the second
        assert f"{line['loss']:.6E}" == stock.curve[line["iteration"]][0]
    assert {(e["format"], e["status"]) for e in proof(run)["entries"]} == {("bf16", "engaged")}
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration, status.reason) == (State.COMPLETED, 3, "")
    identity: Any = read_provenance(run.provenance)["identity"]
    assert identity["loop"] == {"name": "Megatron-LM", "version": version, "commit": None}
    assert identity["arguments"]["global_batch_size"] == 4
    assert not run.root.name.endswith(tuple("0123456789abcdef") * 8)


def test_each_of_the_ten_schemes_is_proved_by_the_per_module_file(
    source: Path, version: str, tmp_path: Path
) -> None:
    """Ten layers, each with a scheme of its own."""
    if version.startswith("0.15."):
        pytest.skip("Megatron-LM 0.15 has no such file")
    configs = {name: {"quantexp": name} for name in SCHEMES}
    matchers = {
        name: {"config": name, "type": "glob", "pattern": f"*layers.{layer}.*", "enabled": True}
        for layer, name in enumerate(SCHEMES)
    }
    file = tmp_path / "modules.yaml"
    file.write_text(json.dumps({"configs": configs, "matchers": matchers}))
    words = ["--num-layers", "10", *_ONE, "--te-precision-config-file", str(file)]
    run = RunDir(tmp_path / "run")
    quantised(run, tmp_path / "cwd", source, "bf16", words)
    formats: dict[int, dict[str, set[str]]] = {}
    for entry in proof(run)["entries"]:
        of_site = formats.setdefault(entry["layer"], {})
        of_site.setdefault(entry["site"], set()).add(entry["format"])
        assert entry["status"] == "engaged", entry
    names = {"mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4_e2m1", "hifp8": "hifp8"}
    for layer, scheme in enumerate(SCHEMES):
        used = {names.get(scheme.rpartition("_")[2], "bf16")}
        assert formats[layer]["linear"] == (used if "linear" in scheme else {"bf16"}), scheme
        assert used <= formats[layer]["qk"] if "FA" in scheme else formats[layer]["qk"] == {"bf16"}


def test_a_step_has_the_loss_and_gradients_of_quantexps_own_loop(
    source: Path, tmp_path: Path
) -> None:
    scheme, recorded = "FA_linear_mxfp4", tmp_path / "recorded.pt"
    run = RunDir(tmp_path / "run")
    plant = str(Path(__file__).with_name("plants_record.py"))
    quantised(
        run,
        tmp_path / "cwd",
        source,
        scheme,
        [*_ONE, "--attention-softmax-in-fp32"],  # as quantexp's own loop
        QUANTEXP_TEST_PLANT=plant,
        RECORDED=str(recorded),
    )
    theirs = torch.load(recorded)
    experiment = experiment_of(llama(train_iters=1), {"QUANTEXP_QUANT": scheme})

    class WithWeights(RecordingObserver):
        def built(self, chunks: list[Any]) -> None:
            super().built(chunks)
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(theirs["weights"][name])

    observer = WithWeights()
    batches = [{**batch, "loss_mask": torch.ones(1, 64)} for batch in theirs["batches"]]
    assert len(batches) == 4
    with session(experiment.training) as device:
        train(experiment, iter(batches), observer, device)
    (ours,) = observer.gradients_by_name
    assert ours.keys() == theirs["gradients"].keys()
    # Without oneDNN's bf16 product (AVX2) torch adds in an order that depends on its operands' strides, which differ in
    # the logits' gradients of the two loops: 1e-4 of a product's elements, where this was measured, are rounded to the
    # neighbour in bf16, at most 2^-7 away.
    by_stride = "output_layer.weight"
    bound = 0.0 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 2**-7 * 1e-3**0.5
    for name, gradient in ours.items():
        difference = torch.linalg.vector_norm(gradient - theirs["gradients"][name])
        limit = bound if name == by_stride else 0.0
        assert difference <= limit * torch.linalg.vector_norm(gradient), name
    # Sums of 64 and of 256 losses, each divided once: equal to the last bits of float32.
    assert lines(run)[0]["loss"] == pytest.approx(observer.metrics[0].loss, rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        ["--pipeline-model-parallel-size", "2"],
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        ["--tensor-model-parallel-size", "2"],
    ],
    ids=["pipeline", "data", "tensor"],
)
def test_a_layout_equals_the_stock_script_in_it(
    source: Path, words: list[str], tmp_path: Path
) -> None:
    stock = run_script(source, tmp_path / "stock", words, 2)
    run = RunDir(tmp_path / "run")
    ours = quantised(run, tmp_path / "ours", source, "bf16", words, num_ranks=2)
    assert len(stock.curve) == 3
    assert ours.curve == stock.curve
    assert len(proof(run)["entries"]) == 72


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("FA_linear_mxfp4", ["--pipeline-model-parallel-size", "2"]),
        ("FA_linear_mxfp8", ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        (
            "FA_linear_mxfp8",
            ["--context-parallel-size", "2", "--no-create-attention-mask-in-dataloader"],
        ),
    ],
    ids=["pipeline", "sequence", "context"],
)
def test_a_scheme_is_proved_in_a_layout(
    source: Path, scheme: str, words: list[str], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    capture = {"QUANTEXP_CAPTURE": "capture=tensors capture.weight_grads=true"}
    quantised(run, tmp_path, source, scheme, [*words, *_ONE], num_ranks=2, **capture)
    statuses = [entry["status"] for entry in proof(run)["entries"]]
    assert statuses == ["engaged"] * 72
    assert sum(entry["format"] != "bf16" for entry in proof(run)["entries"]) == 56
    modules = {(e.metadata["layer"], e.metadata["module"]) for e in open_capture(run.root)}
    names = ("qkv", "attention", "proj", "fc1", "fc2")
    assert modules == {(layer, name) for layer in (0, 1) for name in names}


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (
            f"{_EXPERTS} --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel",
            "",
        ),
        (f"{_EXPERTS} {_LATENT}", "--group-query-attention --num-query-groups=2"),
        (
            "--pipeline-model-parallel-size 2 --fp16 --initial-loss-scale 1024",
            "--bf16 --untie-embeddings-and-output-weights",
        ),
    ],
    ids=["experts tensor", "experts latent", "tied fp16 pipeline"],
)
def test_other_models_are_proved_on_two_ranks(
    source: Path, words: str, without: str, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    options: Any = {"num_ranks": 2, "without": without}
    quantised(run, tmp_path, source, "FA_linear_mxfp4", [*words.split(), *_ONE], **options)
    entries = [entry for entry in proof(run)["entries"] if entry["format"] == "mxfp4_e2m1"]
    assert {entry["site"] for entry in entries} == {"linear", "qk"}
    assert all(
        entry["status"] == "engaged"
        or (entry["status"] == "inconclusive" and "expert" in entry["module"])  # of few tokens
        for entry in entries
    )
    assert sum(entry["status"] == "engaged" for entry in entries) >= 56


def test_a_layer_that_multiplies_the_originals_ends_the_run_before_its_first_step(
    source: Path, tmp_path: Path
) -> None:
    plant, run = str(Path(__file__).with_name("plants_originals.py")), RunDir(tmp_path / "run")
    ended = run_script(
        source,
        tmp_path,
        SPEC,
        QUANTEXP_QUANT="linear_mxfp8",
        QUANTEXP_DIR=str(run.root),
        QUANTEXP_TEST_PLANT=plant,
    )
    assert ended.code == 1
    last = ended.output.strip().splitlines()[-1]
    assert last.startswith("quantexp: ")
    assert "Traceback" not in ended.output
    assert ended.curve == {}
    status = read_status(run.status)
    assert status is not None
    assert (status.state, status.iteration) == (State.FAILED, 0)
    assert last == f"quantexp: {status.reason}"
    assert not run.metrics.exists()


def test_a_refusal_is_one_line(source: Path, tmp_path: Path) -> None:
    words = [*SPEC, "--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"]
    ended = run_script(source, tmp_path, words, QUANTEXP_QUANT="bf16")
    assert ended.code == 1
    last = ended.output.strip().splitlines()[-1]
    assert last.startswith("quantexp: --fp8-format quantises nothing in Megatron's own linear")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("FA_mxfp8", "quantexp: QUANTEXP_QUANT and its companions must describe the same scheme"),
        ("", "quantexp: .*QUANTEXP_QUANT is not set"),
    ],
    ids=["another", "none"],
)
def test_a_rank_with_another_scheme_ends_every_rank_with_one_line(
    source: Path, scheme: str, words: str, tmp_path: Path
) -> None:
    ended = run_script(
        source, tmp_path, SPEC, 2, last={"QUANTEXP_QUANT": scheme}, QUANTEXP_QUANT="linear_mxfp8"
    )
    assert ended.code == 1
    assert "Traceback" not in ended.output
    assert len(re.findall(f"^{words}", ended.output, re.MULTILINE)) == 2, ended.output[-3000:]
    assert not (tmp_path / "runs").exists()


def test_the_wrapper_takes_words(source: Path, tmp_path: Path) -> None:
    before = ("-m", "quantexp.megatron_lm", str(source / "pretrain_gpt.py"))
    own = ["--quantexp-quant", "linear_hifp8", "--quantexp-dir", "named", *_ONE]
    ended = run_script(source, tmp_path, own, before=before)
    assert ended.code == 0, ended.output[-3000:]
    assert proof(RunDir(tmp_path / "named"))["scheme"] == "linear_hifp8"
    assert os.environ.get("QUANTEXP_QUANT") is None
