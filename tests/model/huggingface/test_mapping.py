"""The table: every published row once, every Megatron parameter with its shape."""

from __future__ import annotations

from collections import Counter

import pytest

from quantexp.config.compose import compose
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.sizes import num_padding_parameters, num_parameters
from tests.model.huggingface.published import as_model
from tests.model.huggingface.test_truth import VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_every_published_tensor_is_in_one_place(variant: str) -> None:
    parameters = mapping(as_model(VARIANTS[variant]))
    rows = Counter(
        (part.tensor, row)
        for parameter in parameters
        for part in parameter.parts
        for row in range(part.first, part.first + part.count)
    )
    assert set(rows.values()) == {1}
    shapes = published(parameters)
    assert all(row < shapes[tensor][0] for tensor, row in rows)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        # The numbers of model.safetensors.index.json, and the totals published beside it.
        ("llama32-1b", 146, 1_235_814_400),
        ("llama31-8b", 291, 8_030_261_248),
        ("deepseek2_lite", 5291, 15_706_484_224),
    ],
)
def test_true_models_have_the_published_tensors(name: str, tensors: int, parameters: int) -> None:
    model = compose([f"model={name}"], None, {}).model
    table = mapping(model)
    shapes = published(table)
    assert len(shapes) == tensors
    assert (
        sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
        == parameters
    )
    num_elements = sum(p.shape[0] * (p.width or 1) for p in table)
    assert num_elements == num_parameters(model) + num_padding_parameters(model)
