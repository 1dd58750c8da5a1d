"""What is kept of a published configuration: the ids of special tokens, and how answers are generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantexp.cli.export import export
from quantexp.model.checkpoints import folder_of as checkpoint_of
from quantexp.model.huggingface.token_roles import TokenRoles, token_roles
from quantexp.model.publish import write_config
from tests.model.huggingface.published import of_folder
from tests.model.huggingface.runs import data_words, folder_of, model_words, run_of

IDS = {"bos_token_id": 1, "eos_token_id": [2, 256], "pad_token_id": 3}
GENERATION = b'{"eos_token_id": [2, 7],\n "temperature": 0.6}'
NONE = {"bos_token_id": None, "eos_token_id": None}


def write_roles(folder: Path, ids: dict[str, Any], generation: bytes | None) -> Path:
    """Let a published configuration have these."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | ids))
    if generation is not None:
        (folder / "generation_config.json").write_bytes(generation)
    return folder


def roles_in(folder: Path) -> tuple[dict[str, Any], bytes | None]:
    content = json.loads((folder / "config.json").read_text())
    file = folder / "generation_config.json"
    ids = {key: value for key, value in content.items() if key.endswith("_token_id")}
    return ids, file.read_bytes() if file.is_file() else None


def test_the_first_source_that_has_roles_counts(tmp_path: Path) -> None:
    without = write_roles(tmp_path / "without", {"vocab_size": 4}, None)
    first = write_roles(tmp_path / "first", IDS, GENERATION)
    second = write_roles(tmp_path / "second", {"bos_token_id": 5}, None)
    absent = tmp_path / "absent" / "model.safetensors"
    assert token_roles(None, absent, without, first, second) == TokenRoles(IDS, GENERATION)
    assert token_roles(second / "config.json") == TokenRoles(NONE | {"bos_token_id": 5})
    assert token_roles(without) == token_roles() == TokenRoles(NONE)
    only = write_roles(tmp_path / "only", {}, GENERATION)
    assert token_roles(only) == TokenRoles(NONE, GENERATION)


def test_written_roles_are_read_again(tmp_path: Path) -> None:
    model = of_folder(folder_of("llama31", tmp_path))
    for number, roles in enumerate((None, TokenRoles(IDS, GENERATION))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_config(model, "bfloat16", folder, roles)
        assert token_roles(folder) == roles or TokenRoles()
        assert of_folder(folder).num_layers == model.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("is_published", [True, False])
def test_checkpoints_and_exports_keep_the_roles_of_their_source(
    is_published: bool, tmp_path: Path, cache: Path
) -> None:
    source = write_roles(folder_of("llama31", tmp_path), IDS, GENERATION)
    own = data_words(tmp_path)
    shards = ["checkpoint.optimizer=true", f"checkpoint.publish={str(is_published).lower()}"]
    run = run_of([*model_words(source), *own, "checkpoint.every=1", *shards], tmp_path, cache)
    assert roles_in(checkpoint_of(run, 1)) == (IDS, GENERATION)
    out = export([str(run.root), "format=hf"], run.root.parent)
    assert roles_in(out) == (IDS, GENERATION)
    words = [f"model.from_hf={source}", "training.seq_length=32", *own, "checkpoint.every=1"]
    words += [f"training.start_from={run.root.name}@1"]
    write_roles(source, {"bos_token_id": 9}, b"{}")
    after = run_of(words, tmp_path, cache)
    assert roles_in(checkpoint_of(after, 2)) == (IDS, GENERATION)


@pytest.mark.slow
def test_an_export_ends_where_its_tokenizer_does_if_its_source_does_not(
    tmp_path: Path, cache: Path
) -> None:
    source = folder_of("llama31", tmp_path)
    content = json.loads((source / "config.json").read_text())
    kept = {key: value for key, value in content.items() if not key.endswith("_token_id")}
    (source / "config.json").write_text(json.dumps(kept))
    (source / "generation_config.json").unlink(missing_ok=True)
    words = [*model_words(source), *data_words(tmp_path), "checkpoint.at_end=true"]
    run = run_of(words, tmp_path, cache)
    assert roles_in(checkpoint_of(run, 2)) == (NONE, None)
    out = export([str(run.root), "format=hf"], run.root.parent)
    assert roles_in(out) == (NONE | {"eos_token_id": 256}, None)
