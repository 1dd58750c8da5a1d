"""`quantexp export RUN format=hf`: a run's checkpoint as a published model, with config.json and tokenizer.

Instead of RUN the folder of a Megatron-LM checkpoint; its tokenizer is not in it, and not written. And
`format=megatron_lm` writes a run's checkpoint as one from which Megatron-LM starts.

What comes out is what transformers and other tools load by its folder. Weights are copied as they were saved, bit for
bit, or made from the training state to the same bits (checkpoint.publish=false). The tokenizer is the run's: a Hugging
Face folder's files, the one file of another kind under its own name; the byte tokenizer is written as the
tokenizer.json that gives the same ids.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantexp.analysis.compare.arguments import named_runs, out_and_rest
from quantexp.cli.arguments import root_and_rest
from quantexp.cli.output import print_line
from quantexp.config.load import read
from quantexp.data.prepared import tokenizer_of
from quantexp.data.tokenizers.load import ByteTokenizer
from quantexp.errors import ConfigError, DataError, RunError, UnreadableError
from quantexp.extra import Service, require_extra, required, service
from quantexp.folders import user_path, writing_into
from quantexp.model.checkpoint_hashes import HASHES, require_intact, saved_files
from quantexp.model.checkpoints import (
    PADDING,
    STATE,
    STATE_INDEX,
    folder_of,
    is_published,
    saved_iterations,
)
from quantexp.model.huggingface import CONFIG
from quantexp.model.huggingface.token_roles import token_roles
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.publish import write_published
from quantexp.model.saved_tensors import SavedTensors
from quantexp.model.training_state import read_index
from quantexp.reading.json_files import require_json
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import read_provenance
from quantexp.schema import DatasetConfig, Experiment, TokenizerKind

#: What a checkpoint has besides its published form.
_LEFT_OUT = (PADDING, STATE)
_FORMATS = ("hf", "megatron_lm")
_END_OF_DOCUMENT = "<|endoftext|>"


def run(arguments: argparse.Namespace) -> int:
    """Export a run's model and print its folder; returns 0.

    Raises:
        QuantexpError: see `export`.
    """
    root, words = root_and_rest(arguments.words)
    print_line(str(export(words, root)))
    return 0


def export(words: Sequence[str], root: Path) -> Path:
    """Export as the words of the command line say; returns the new folder.

    Args:
        words: a run or a Megatron-LM checkpoint, the format, and perhaps `iteration=N` (else the last) and
            `out=FOLDER`.
        root: the folder of the run folders.

    Raises:
        ConfigError: words that say something else.
        RunError: no such run, no such checkpoint, or the folder is taken or cannot be written.
        DataError: the run's tokenizer is missing, or another one than the run had; the checkpoint is damaged.
    """
    out, rest = out_and_rest(words)
    options = dict(word.split("=", 1) for word in rest if _is_option(word))
    named = [word for word in rest if not _is_option(word)]
    wanted = options.get("format")
    if wanted not in _FORMATS:
        raise ConfigError(f"export needs format={' or format='.join(_FORMATS)}, got {wanted!r}")
    if wanted == "megatron_lm":
        require_extra("megatron_lm", "format=megatron_lm")
    reader_of = service(Service.READER)
    if len(named) == 1 and reader_of is not None:
        folder = user_path(named[0])
        if (read_weights := reader_of(folder)) is not None:
            target = _target_of_megatron_lm(folder, wanted, out)
            weights = read_weights(options.get("iteration"))
            return _written(target, lambda part: write_published(weights, weights.model, part))
    run = _run(named, root)
    iteration = _iteration(run, options.get("iteration"))
    folder, experiment = folder_of(run, iteration), read(run.config)
    require_intact(folder, _LEFT_OUT if is_published(folder) else ())

    def write_hf(part: Path) -> None:
        end = _write_tokenizer(experiment.dataset, _recorded(run), part)
        _write_weights(experiment, folder, part)
        content = require_json(part / CONFIG, dict[str, Any])
        declared = content.get("eos_token_id")
        if end not in (declared if isinstance(declared, list) else [declared]):
            content["eos_token_id"] = end
            (part / CONFIG).write_text(json.dumps(content, indent=2) + "\n")

    def write_megatron_lm(part: Path) -> None:
        published = part / ".published"
        published.mkdir()
        _write_weights(experiment, folder, published)
        padding = open_weights(folder / PADDING) if (folder / PADDING).is_file() else None
        write = required(Service.WRITER, "format=megatron_lm")
        write(experiment.model, open_weights(published), padding, part, iteration)
        shutil.rmtree(published)

    if wanted == "hf":
        return _written(out or run.exported(iteration), write_hf)
    target = out or run.exported(iteration).with_name(f"megatron_lm_iteration_{iteration:08d}")
    return _written(target, write_megatron_lm)


def _target_of_megatron_lm(folder: Path, wanted: str, out: Path | None) -> Path:
    """Where a Megatron-LM checkpoint is exported to: `out`, which must be there."""
    if wanted != "hf":
        raise ConfigError(
            f"{folder} is a checkpoint of Megatron-LM already; export it with format=hf"
        )
    if out is None:
        raise ConfigError(
            f"{folder} is no run folder, in which an export has its place; give out=FOLDER"
        )
    return out


def _written(target: Path, write: Callable[[Path], object]) -> Path:
    """A new folder, written under another name first."""
    target = target.absolute()
    if target.exists():
        raise RunError(f"{target} is there already; give out=FOLDER, or remove it")
    part = target.with_name(target.name + ".part")
    try:
        with writing_into(target, RunError, "out=FOLDER"):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write(part)
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _write_weights(experiment: Experiment, folder: Path, part: Path) -> None:
    """Copy the published form of a checkpoint, or make it from the shards, to the same bytes."""
    if not is_published(folder):
        model, precision = experiment.model, experiment.training.precision
        files = read_index(folder / STATE / STATE_INDEX).files
        tensors = SavedTensors.open(folder / STATE, files, model, precision)
        write_published(tensors, model, part, roles=token_roles(folder))
        return
    for file in saved_files(folder):
        if file.parent == folder and file.name not in (*_LEFT_OUT, HASHES):
            shutil.copyfile(file, part / file.name)


def _is_option(word: str) -> bool:
    return word.partition("=")[0] in ("format", "iteration") and "=" in word


def _run(words: list[str], root: Path) -> RunDir:
    if not words:
        raise ConfigError("export takes a run: its folder, or a part of its name")
    runs = named_runs(words, root).runs
    if len(runs) != 1:
        raise ConfigError(f"export takes one run, {' '.join(words)} are {len(runs)}")
    return runs[0]


def _iteration(run: RunDir, word: str | None) -> int:
    saved = saved_iterations(run)
    if not saved:
        raise RunError(
            f"{run.root} has no checkpoint: the same experiment with checkpoint.at_end=true runs again and saves one"
        )
    if word is None:
        return saved[-1]
    if not word.isdecimal() or int(word) not in saved:
        raise ConfigError(f"iteration must be one of {', '.join(map(str, saved))}, got {word}")
    return int(word)


def _recorded(run: RunDir) -> str | None:
    """The fingerprint of the run's tokenizer; that of the sample never changes."""
    try:
        data = read_provenance(run.provenance)["identity"]["data"]
    except (UnreadableError, KeyError) as error:
        raise RunError(f"{run.provenance} does not say what data the run had: {error}") from error
    return data.get("tokenizer")


def _write_tokenizer(dataset: DatasetConfig, recorded: str | None, folder: Path) -> int:
    """Write the run's tokenizer; returns the id of the end of a document."""
    if dataset.tokenizer is TokenizerKind.byte:
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END_OF_DOCUMENT}
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=2) + "\n")
        return ByteTokenizer.eod
    tokenizer = tokenizer_of(dataset)
    if tokenizer.fingerprint() != recorded:
        raise DataError(
            f"{dataset.tokenizer_path} is another tokenizer than the run had; put that one back to export it"
        )
    first, *companions = tokenizer.files
    is_json = dataset.tokenizer is TokenizerKind.huggingface
    shutil.copyfile(first, folder / ("tokenizer.json" if is_json else first.name))
    for file in companions:
        shutil.copyfile(file, folder / file.name)
    return tokenizer.eod


def byte_tokenizer_json() -> dict[str, Any]:
    """A tokenizer.json with the ids of `ByteTokenizer`: a vocabulary of bytes, and no merges.

    Its alphabet is GPT-2's, where each byte has a printable character: its own, or one from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    by_bytes = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ByteTokenizer.eod,
                "content": _END_OF_DOCUMENT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **by_bytes},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **by_bytes},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
