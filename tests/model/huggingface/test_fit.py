"""Weights that are not the model's, each refused in one line that names the problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantexp.errors import ConfigError, DataError
from quantexp.model.huggingface.fit import fitting_weights
from tests.model.huggingface.published import (
    DEEPSEEK,
    LLAMA31,
    LLAMA32,
    of_folder,
    published_model,
    write,
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(published_model(LLAMA31), LLAMA31, tmp_path / "llama")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return write(published_model(LLAMA32), LLAMA32, tmp_path / "tied")


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) leave out tensors; `__` stands for a dot."""
    file = folder / "model.safetensors"
    content = load_file(file)
    for key, tensor in tensors.items():
        content.pop(key.replace("__", "."), None)
        if tensor is not None:
            content[key.replace("__", ".")] = tensor
    save_file(content, file)


def test_own_weights_fit(llama: Path, tied: Path) -> None:
    assert len(fitting_weights(of_folder(llama)).tensors) == 2 * 9 + 3
    assert len(fitting_weights(of_folder(tied)).tensors) == 3 * 9 + 2


def test_derived_tensors_and_a_second_copy_of_tied_embeddings_are_accepted(tied: Path) -> None:
    change(tied, lm_head__weight=torch.zeros(128, 55))
    change(tied, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(9))
    fitting_weights(of_folder(tied))


def test_missing_tensors_are_counted_and_the_first_five_named(llama: Path) -> None:
    model = of_folder(llama)
    change(
        llama,
        **{f"model__layers__1__mlp__{name}_proj__weight": None for name in ("gate", "up", "down")},
    )
    with pytest.raises(
        DataError,
        match=r"does not hold the weights of this small: 3 tensors missing: model\.layers\.1\.mlp\.gate_proj\.weight, "
        r"model\.layers\.1\.mlp\.up_proj\.weight, model\.layers\.1\.mlp\.down_proj\.weight$",
    ):
        fitting_weights(model)


def test_weights_of_another_model_are_refused_with_five_of_each(
    llama: Path, tmp_path: Path
) -> None:
    other = write(published_model(DEEPSEEK), DEEPSEEK, tmp_path / "other")
    (other / "config.json").unlink()
    model = of_folder(llama)
    model.init_from = str(other)
    with pytest.raises(DataError) as raised:
        fitting_weights(model)
    message = str(raised.value)
    assert "\n" not in message
    assert "7 tensors missing: model.layers.0.self_attn.k_proj.weight, " in message
    assert "model.layers.1.mlp.gate_proj.weight and 2 more; " in message
    assert "tensors not of this model: model.layers.0.self_attn.kv_a_layernorm.weight, " in message
    assert "model.embed_tokens.weight [131, 60] instead of [201, 60]" in message


def test_other_shapes_are_reported(llama: Path) -> None:
    model = of_folder(llama)
    change(llama, model__norm__weight=torch.zeros(61), lm_head__weight=torch.zeros(200, 60))
    with pytest.raises(
        DataError,
        match=r"2 tensors of another shape: model\.norm\.weight \[61\] instead of \[60\], lm_head\.weight \[200, 60\]",
    ):
        fitting_weights(model)


def test_other_dtypes_are_reported(llama: Path) -> None:
    model = of_folder(llama)
    change(llama, model__norm__weight=torch.zeros(60, dtype=torch.float8_e4m3fn))
    with pytest.raises(
        DataError, match=r"1 tensors neither F32, BF16, F16: model\.norm\.weight F8_E4M3"
    ):
        fitting_weights(model)


def test_different_configuration_beside_the_weights_is_reported(llama: Path) -> None:
    """Shapes do not reveal it: Llama 3 and 3.1 differ in nothing else."""
    model = of_folder(llama)
    model.rope_scaling_factor, model.max_sequence_length = None, 100
    with pytest.raises(
        DataError,
        match=r"model\.rope_scaling_factor is None and its config\.json says 8\.0 \(model\.from_hf=.*json takes a",
    ):
        fitting_weights(model)
    (llama / "config.json").unlink()
    fitting_weights(model)


def test_part_that_only_one_configuration_has_is_reported(tmp_path: Path) -> None:
    plain = {**DEEPSEEK, "rope_scaling": None}
    folder = write(published_model(plain), plain, tmp_path / "plain")
    model = of_folder(folder)
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    with pytest.raises(
        DataError,
        match=r"model\.mla\.yarn\.factor is None and its config\.json says 40",
    ):
        fitting_weights(model)
    model = of_folder(folder)
    (folder / "config.json").write_text(json.dumps(plain))
    with pytest.raises(
        DataError, match=r"model\.mla\.yarn\.factor is 40\.0 and its config\.json says None"
    ):
        fitting_weights(model)


def test_unknown_architecture_beside_the_weights_is_reported(llama: Path) -> None:
    model = of_folder(llama)
    (llama / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    with pytest.raises(
        ConfigError, match=r"of model_type 'gpt2' \(GPT2LMHeadModel\), which is not built"
    ):
        fitting_weights(model)
