"""The scheme that a bisection writes is the run's with its rules, and composes again."""

from __future__ import annotations

from pathlib import Path

from quantexp.config.compose import compose
from quantexp.extras.bisect.result import override, write_scheme
from quantexp.quant.precision import precision_map
from quantexp.schema import QuantConfig, Rule

OUTLIERS = "{take: elements, share: 0.01, format: mxfp8}"


def declared(quant: QuantConfig, *words: str) -> object:
    return precision_map(compose(list(words), None, {}).model, quant)


def test_parts_and_rules_that_take_them_away_are_in_the_file_and_in_the_override(
    tmp_path: Path,
) -> None:
    """Of three layers, the first has no parts, the second others, and the last is in bf16."""
    rules = f"quant.rules=[{{layers: [0], parts: []}},{{layers: [1], operands: [x], parts: [{OUTLIERS}]}}]"
    words = ["quant=more/linear_nvfp4_averis", rules, "model.num_layers=3"]
    quant, last = compose(words, None, {}).quant, [Rule(layers=[2], format="bf16")]
    write_scheme(quant, last, "layer 2", tmp_path)
    from_file = compose(["quant=bisected", "model.num_layers=3"], tmp_path, {})
    expected = compose([*words[:1], override(quant, last), words[2]], None, {}).quant
    maps = [declared(each, "model.num_layers=3") for each in (from_file.quant, expected)]
    assert maps[0] == maps[1]
    assert maps[0] != declared(quant, "model.num_layers=3")
