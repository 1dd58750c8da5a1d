"""Export: transformers loads the weights that a run saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantexp.cli.export import byte_tokenizer_json, export
from quantexp.cli.main import main
from quantexp.config.load import read, save
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import ConfigError, DataError, RunError
from quantexp.model.checkpoints import folder_of as checkpoint_of
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.publish import write_published
from quantexp.runs.paths import RunDir
from quantexp.schema import Precision, TokenizerKind
from quantexp.training.megatron.model import build_model
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import stock_spec
from quantexp.training.megatron.transformer_config import DTYPES
from tests.model.huggingface.published import FAMILIES, of_folder, published_model, training, write
from tests.model.huggingface.runs import TEXT, data_words, folder_of, model_words, run_of
from tests.training.megatron.whole_models import load, saved_tensors

pytestmark = pytest.mark.slow


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in open_weights(folder).files:
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("shard_bytes", [40_000, 10**9])
@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_weights_are_the_loaded_ones_bit_for_bit(
    family: str,
    precision: Precision,
    shard_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantexp.model.publish.SHARD_BYTES", shard_bytes)
    dtype = DTYPES[precision]
    config = FAMILIES[family]
    published = write(published_model(config).to(dtype), config, tmp_path / "given")
    model = of_folder(published)
    with session(training(precision)):
        gpt, _ = build_model(model, training(precision), stock_spec(model))
        load(gpt, model)
        tensors = saved_tensors(gpt, model, precision, tmp_path / "shards")
    (tmp_path / "saved").mkdir()
    write_published(tensors, model, tmp_path / "saved")
    before, after = tensors_of(published), tensors_of(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype == dtype for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = of_folder(tmp_path / "saved")
    again.init_from = model.init_from
    assert again == model
    files = open_weights(tmp_path / "saved").files
    assert len(files) == 1 if shard_bytes == 10**9 else len(files) > 2
    assert all(file.stat().st_size < shard_bytes + 10_000 for file in files)


@pytest.fixture(params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path: Path, cache: Path) -> RunDir:
    """Published weights, two iterations of training, both saved."""
    words = [*model_words(folder_of(request.param, tmp_path)), *data_words(tmp_path)]
    return run_of([*words, "checkpoint.every=1", "training.precision=fp32"], tmp_path, cache)


def test_transformers_loads_an_export(
    trained: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (
        main(["export", trained.root.name, "format=hf", f"paths.root={trained.root.parent}"]) == 0
    )
    folder = trained.exported(2)
    assert capsys.readouterr().out.strip() == str(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto", attn_implementation="eager"
    )
    model, problems = loaded
    assert not any(problems.values()), problems
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == 256
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT).input_ids == ByteTokenizer().tokenize(TEXT)
    assert tokenizer.eos_token_id == 256
    ours = of_folder(folder)
    tokens = torch.tensor([ByteTokenizer().tokenize(TEXT)[:41]])
    with session(training()), torch.no_grad():
        gpt, _ = build_model(ours, training(), stock_spec(ours))
        load(gpt, ours)
        logits = gpt(tokens, torch.arange(41)[None], None)[..., :257]
        assert (logits - model(tokens).logits).abs().max() < 1e-4  # as in test_truth
    first, last = tensors_of(checkpoint_of(trained, 1)), tensors_of(folder)
    assert any(not torch.equal(first[name], last[name]) for name in first)


@pytest.fixture
def llama(tmp_path: Path, cache: Path) -> RunDir:
    words = [*model_words(folder_of("llama31", tmp_path)), *data_words(tmp_path)]
    checkpoint = ["checkpoint.at_end=true", "checkpoint.optimizer=true"]
    return run_of([*words, *checkpoint], tmp_path, cache)


def test_shards_are_exported_to_the_bytes_of_the_published_form(
    tmp_path: Path, cache: Path
) -> None:
    """Two equal runs, one of which publishes; the export adds the tokenizer and its end of text to each."""
    folder = folder_of("deepseek_v2", tmp_path)
    words = [*model_words(folder), *data_words(tmp_path), "checkpoint.every=1"]
    words += ["checkpoint.optimizer=true"]
    published = run_of(words, tmp_path / "published", cache)
    shards = run_of([*words, "checkpoint.publish=false"], tmp_path / "shards", cache)
    left = {path.name for path in checkpoint_of(shards, 2).iterdir()}
    assert left == {"state", "config.json", "generation_config.json", "hashes.json"}
    one, other = (
        export([str(run.root), "format=hf", "iteration=2"], run.root.parent)
        for run in (published, shards)
    )
    files = sorted(file.name for file in one.iterdir())
    assert files == sorted(file.name for file in other.iterdir())
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert tensors_of(checkpoint_of(published, 2)).keys() == tensors_of(other).keys()
    file = checkpoint_of(shards, 1) / "state" / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"rank00000\.safetensors is damaged: it has "):
        export([str(shards.root), "format=hf", "iteration=1"], shards.root.parent)


def test_a_run_goes_to_megatron_lm_and_back_bit_for_bit(llama: RunDir, tmp_path: Path) -> None:
    root = llama.root.parent
    here = tmp_path / "here"
    published = export([str(llama.root), "format=hf", f"out={here / 'hf'}"], root)
    written = export([str(llama.root), "format=megatron_lm"], root)
    assert written == llama.root / "export" / "megatron_lm_iteration_00000002"
    back = export([str(written), "format=hf", f"out={here / 'back'}"], root)
    ours, theirs = tensors_of(published), tensors_of(back)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name][: len(tensor)], tensor), name


def test_wrong_words_of_export_are_reported(llama: RunDir, tmp_path: Path) -> None:
    root, name = llama.root.parent, str(llama.root)
    for words, message in [
        (["format=hf"], "export takes a run: its folder, or a part of its name"),
        ([name], "export needs format=hf or format=megatron_lm, got None"),
        ([name, "format=gguf"], "export needs format=hf or format=megatron_lm, got 'gguf'"),
        ([name, "format=hf", "iteration=1"], "iteration must be one of 2, got 1"),
        ([name, "format=hf", "iteration=last"], "iteration must be one of 2, got last"),
    ]:
        with pytest.raises(ConfigError, match=message):
            export(words, root)
    shutil.copytree(llama.root, root / f"{llama.root.name[:-8]}00000000")
    with pytest.raises(ConfigError, match=r"export takes one run, .* are 2"):
        export([str(root), "format=hf"], root)
    out = export([name, "format=hf", "iteration=2", f"out={tmp_path / 'here'}"], root)
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    with pytest.raises(RunError, match=r"here is there already; give out=FOLDER, or remove it"):
        export([name, "format=hf", f"out={tmp_path / 'here'}"], root)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=r"file/x cannot be written: Not a directory; give another with out=FOLDER$"
    ):
        export([name, "format=hf", f"out={tmp_path / 'file' / 'x'}"], root)


def test_run_without_a_checkpoint_says_how_to_get_one(llama: RunDir) -> None:
    shutil.rmtree(llama.checkpoints)
    with pytest.raises(
        RunError, match=r"has no checkpoint: the same experiment with checkpoint\.at_end=true ru"
    ):
        export([str(llama.root), "format=hf"], llama.root.parent)


def test_damaged_checkpoint_is_not_exported(llama: RunDir, tmp_path: Path) -> None:
    weights = checkpoint_of(llama, 2) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.safetensors is damaged: .*; there is none before"):
        export([str(llama.root), "format=hf", f"out={tmp_path / 'out'}"], llama.root.parent)
    assert not (tmp_path / "out").exists()


def test_run_without_a_record_of_its_data_is_refused(llama: RunDir) -> None:
    llama.provenance.write_text("{}")
    with pytest.raises(RunError, match=r"provenance\.json does not say what data the run had"):
        export([str(llama.root), "format=hf"], llama.root.parent)


def test_runs_own_tokenizer_is_exported_and_no_other(llama: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    experiment = read(llama.config)
    experiment.dataset.tokenizer = TokenizerKind.huggingface
    experiment.dataset.tokenizer_path = str(folder)
    save(experiment, llama.config)
    with pytest.raises(
        DataError, match=r"is another tokenizer than the run had; put that one back to export"
    ):
        export([str(llama.root), "format=hf"], llama.root.parent)
    assert not llama.exported(2).exists()
    content: dict[str, Any] = json.loads(llama.provenance.read_text())
    from quantexp.data.tokenizers.load import load_tokenizer

    content["identity"]["data"]["tokenizer"] = load_tokenizer(
        "huggingface", str(folder)
    ).fingerprint()
    llama.provenance.write_text(json.dumps(content))
    out = export([str(llama.root), "format=hf"], llama.root.parent)
    for name in ("tokenizer.json", "special_tokens_map.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 256


def test_byte_tokenizer_is_the_same_for_every_byte_and_character() -> None:
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(json.dumps(byte_tokenizer_json()))
    text = "".join(map(chr, [*range(0x800), 0x20AC, 0x1F600, 0x10FFFF])) + "  a\n\n b"
    assert theirs.encode(text).ids == ByteTokenizer().tokenize(text)
    assert theirs.decode(theirs.encode(text).ids) == text
    assert theirs.get_vocab_size(with_added_tokens=True) == ByteTokenizer.vocab_size
    assert theirs.token_to_id("<|endoftext|>") == ByteTokenizer.eod
