"""The per-module file names a scheme for some modules; the others have the run's."""

from __future__ import annotations

import pytest

from quantexp.errors import ConfigError
from quantexp.extras.megatron_lm.described import experiment_of
from quantexp.extras.megatron_lm.schemes import schemes_of_file
from quantexp.quant.precision import ModuleId, precision_map
from tests.extras.megatron_lm.arguments import llama


def test_a_module_has_the_slots_of_its_own_scheme() -> None:
    args = llama()
    experiment = experiment_of(args, {"QUANTEXP_QUANT": "linear_mxfp8"})
    other = experiment_of(args, {"QUANTEXP_QUANT": "FA_linear_mxfp4"})
    chosen = [ModuleId(0, "fc1"), ModuleId(1, "attention")]
    entries = {name: {"quantexp": "FA_linear_mxfp4"} for name in chosen}
    declared = schemes_of_file(experiment, args, entries).declared(1)
    own = precision_map(experiment.model, experiment.quant, 1)
    theirs = precision_map(other.model, other.quant, 1)
    assert declared == {**own, **{name: theirs[name] for name in chosen}}


def test_the_map_changes_where_any_scheme_does() -> None:
    args = llama(train_iters=20)
    experiment = experiment_of(args, {"QUANTEXP_QUANT": "bf16"})
    words = "quant=linear_mxfp8 quant.rules=[{format:bf16,iterations:[1,5]}]"
    schemes = schemes_of_file(experiment, args, {ModuleId(0, "fc1"): {"quantexp": words}})
    assert schemes.changes == [1, 6]
    record = schemes.record(3)
    assert [iteration for iteration, _ in record] == [1]


@pytest.mark.parametrize("entry", [{"recipe": "mxfp8"}, {"quantexp": 8}, {"quantexp": "a", "b": 1}])
def test_an_entry_of_something_else_is_refused(entry: dict[str, object]) -> None:
    args = llama()
    experiment = experiment_of(args, {"QUANTEXP_QUANT": "bf16"})
    words = r"the configuration of layer 0 fc1 must be \{quantexp: SCHEME\}, got "
    with pytest.raises(ConfigError, match=words):
        schemes_of_file(experiment, args, {ModuleId(0, "fc1"): entry})
