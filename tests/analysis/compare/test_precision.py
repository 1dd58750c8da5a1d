from __future__ import annotations

from quantexp.analysis.compare.precision import precision_changes, settings

from .runs import BF16, MX8, entries


def test_slots_of_one_change_are_reported_together() -> None:
    (change,) = precision_changes({1: entries(MX8)}, {1: entries(BF16)})
    assert (change.site, change.slots) == ("linear", ("fprop.x", "fprop.w"))
    assert (change.baseline, change.here) == ("high", "mxfp8_e4m3 32 rceil even")
    assert (change.layers, change.modules, change.num_slots) == ("0-1", ("qkv", "fc1"), 8)


def test_equal_maps_have_no_change_however_often_they_are_written() -> None:
    assert precision_changes({1: entries(MX8), 3: entries(MX8)}, {1: entries(MX8)}) == []


def test_one_slot_that_differs_is_reported_alone() -> None:
    here = entries(MX8)
    here[3] = {**here[3], "rounding": "stochastic"}
    (change,) = precision_changes({1: here}, {1: entries(MX8)})
    assert (change.layers, change.modules, change.slots) == ("0", ("fc1",), ("fprop.w",))
    assert change.here == "mxfp8_e4m3 32 rceil stochastic"


def test_a_map_that_changes_during_training_is_reported_with_its_iteration() -> None:
    warm_up = {1: entries(BF16), 3: entries(MX8), 9: entries(BF16)}
    first, second = precision_changes(warm_up, {1: entries(BF16)})
    assert (first.iteration, first.here) == (3, "mxfp8_e4m3 32 rceil even")
    assert (second.iteration, second.here, second.num_slots) == (9, "the same", 0)


def test_slots_that_one_map_lacks_are_changes() -> None:
    (change,) = precision_changes({1: entries(MX8, 3)}, {1: entries(MX8, 2)})
    assert (change.layers, change.baseline) == ("2", "no such slot")


def test_output_layer_that_a_map_lacks_is_in_high_precision() -> None:
    places = {"layer": 16, "module": "output", "site": "output"}
    here = [{**entry, **places} for entry in entries(MX8, 1)[:2]]
    (change,) = precision_changes({1: here}, {1: []})
    assert (change.layers, change.modules, change.baseline) == ("output", ("output",), "high")
    unquantised = [{**entry, **places} for entry in entries(BF16, 1)[:2]]
    assert precision_changes({1: unquantised}, {1: []}) == []


def test_settings_name_every_option_that_is_set() -> None:
    entry = {**entries(MX8)[0], "hadamard": "random", "saturate": None, "reuse": True, "calls": 3}
    assert settings(entry) == "mxfp8_e4m3 32 rceil even (forward copy) hadamard=random"


def test_settings_put_parts_into_words_and_tell_all_apart() -> None:
    mean = {"take": "mean", "along": "tokens", "format": "bf16", "axis": "input_width"}
    keys = {"take": "mean", "along": "keys", "format": "none"}
    hot = {"take": "elements", "share": 0.1, "from_error": True, **entries(MX8)[0]}
    words = "mxfp8_e4m3 32 rceil even"
    for parts, expected in (
        ([keys], "without mean along keys"),
        (
            [mean, hot],
            f"apart mean along tokens in high, apart largest 0.1 of elements of the error in {words}",
        ),
    ):
        assert settings({**entries(MX8)[0], "parts": parts}) == f"{words}, {expected}"
    others = [{**hot, "share": 0.1 + 2**-54}, {**hot, "block": 16}, {**hot, "from_error": None}]
    assert len({settings({"parts": [part]}) for part in (hot, *others)}) == 4
