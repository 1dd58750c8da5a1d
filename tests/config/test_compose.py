"""Names of schemes, sweeps and the old scripts' variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError

OWN = """\
defaults:
  - linear: mxfp8
  - qk: none
  - pv: none
  - _self_

name: own
linear:
  dgrad:
    g: {format: bf16}
"""


def name(*words: str, config_dir: Path | None = None) -> str | None:
    return compose(list(words), config_dir, {}).quant.name


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config-dir with the scheme `own`; its path needs every kind of quoting."""
    folder = tmp_path / "it's, a \\ folder"
    (folder / "quant").mkdir(parents=True)
    (folder / "quant" / "own.yaml").write_text(OWN)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quant=FA_mxfp8", "quant/pv=hifp8"], "qk_mxfp8+pv_hifp8"),
        (["quant=bf16", "quant/linear=mxfp4"], "linear_mxfp4"),
        (["quant/linear=mxfp8", "quant/qk=mxfp8"], "FA_linear_mxfp8"),
        (["quant=FA_linear_mxfp8", "quant/qk=hifp8"], "linear_mxfp8+qk_hifp8"),
        (["quant=FA_linear_mxfp8", "quant/linear=none", "quant/qk=none"], "bf16"),
        (["quant=more/FA_full_mxfp8"], "FA_full_mxfp8"),
    ],
)
def test_composition_is_named_by_its_quantisation(words: list[str], expected: str) -> None:
    assert name(*words) == expected


def test_changed_slot_makes_the_site_custom() -> None:
    changed = name("quant=linear_mxfp8", "quant.linear.wgrad.g.format=mxfp8_e5m2")
    assert changed is not None
    assert changed.startswith("linear_custom~")


def test_rule_adds_a_hash_of_the_meaning() -> None:
    first = name("quant=linear_mxfp8", "quant.rules=[{layers:[0],format:bf16}]")
    other = name("quant=linear_mxfp8", "quant.rules=[{layers:[1],format:bf16}]")
    assert first is not None
    assert first.startswith("linear_mxfp8~")
    assert first != other


@pytest.mark.parametrize(
    "rules",
    [
        "{sites: [linear], format: mxfp8}",
        "{sites: [qk], format: bf16}",
        "{layers: [0], sites: [linear], format: bf16}, {layers: [0], sites: [linear], format: mxfp8}",
    ],
)
def test_rules_that_change_no_slot_of_the_run_are_not_in_the_name(rules: str) -> None:
    """Two names of one map would be two folders of one run."""
    words = ("model=tiny", "quant=linear_mxfp8")
    assert name(*words, f"quant.rules=[{rules}]") == "linear_mxfp8"
    effective = "{layers: [1], format: bf16}"
    alone = name(*words, f"quant.rules=[{effective}]")
    assert alone == name(*words, f"quant.rules=[{rules}, {effective}]") != "linear_mxfp8"


def test_a_named_scheme_keeps_its_name_under_rules_that_change_no_slot(tmp_path: Path) -> None:
    """Its own rules, too: those of the file and of the command line may differ where neither is in force."""
    scheme = (
        "name: own\nlinear: {fprop: {x: {format: mxfp8, scale_rule: ceil}}}\n"
        "rules: [{format: bf16, iterations: [100, null]}]\n"
    )
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "own.yaml").write_text(scheme)
    words = (*_TEN_ITERATIONS, "quant=own")
    for rules in ("", "{format: bf16, iterations: [50, 60]}", "{sites: [qk], format: bf16}"):
        assert name(*words, f"quant.rules=[{rules}]", config_dir=tmp_path) == "own"
    changed = name(*words, "quant.rules=[{layers: [0], format: bf16}]", config_dir=tmp_path)
    assert str(changed).startswith("linear_custom~")


def test_overridden_shipped_extra_scheme_loses_its_name() -> None:
    changed = name("quant=more/FA_full_hifp8", "quant/pv=hifp8")
    assert changed is not None
    assert changed.startswith("qk_custom+pv_hifp8~")


_TEN_ITERATIONS = ["model=tiny", "training=fast", "training.iterations=10"]


_EVALUATED = ["evaluate.only=true", "training.start_from=a@5", "capture=off"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["quant=linear_mxfp4", "quant.rules=[{format: mxfp8, iterations: [11, null]}]"],
            r"linear_mxfp4",
        ),
        (["quant=bf16", "quant.rules=[{format: bf16}]"], "bf16"),
        (["quant=linear_mxfp4", "quant.rules=[{format: mxfp8}]"], r"linear_mxfp8~\w{6}"),
        (
            ["quant=linear_mxfp4", "quant.rules=[{format: mxfp8, layers: [0]}]"],
            r"linear_mxfp4~\w{6}",
        ),
        (
            [
                "quant=FA_linear_mxfp4",
                "quant.rules=[{sites: [linear], format: hifp8, iterations: [1, 5]}, "
                "{sites: [linear], format: mxint8, iterations: [6, 12]}]",
            ],
            r"linear_custom\+qk_mxfp4~\w{6}",
        ),
        (
            ["quant=bf16", "quant.rules=[{format: mxfp4, iterations: [10, null]}]"],
            r"rules_mxfp4_e2m1~\w{6}",
        ),
        (
            ["quant=FA_linear_mxfp4", "quant.rules=[{sites: [linear], format: bf16}]"],
            r"qk_mxfp4~\w{6}",
        ),
        (
            [
                "quant=linear_mxfp4",
                "quant/output=mxfp4",
                "quant.rules=[{sites: [output], format: bf16}]",
            ],
            r"linear_mxfp4~\w{6}",
        ),
        (
            [
                "quant=linear_mxfp4",
                "quant.rules=[{format: bf16}]",
                "quant.optimizer.exp_avg.format=mxfp8",
            ],
            r"exp_avg_mxfp8~\w{6}",
        ),
        (
            [
                "quant=more/linear_mxfp8_floor",
                "quant.rules=[{format: bf16, iterations: [11, null]}]",
            ],
            "linear_mxfp8_floor",
        ),
        (
            [
                "quant=more/linear_mxfp8_floor",
                "quant.rules=[{format: bf16, iterations: [10, null]}]",
            ],
            r"linear_custom~\w{6}",
        ),
        (["quant=more/adam_fp8_block", "quant.rules=[{format: bf16}]"], "adam_fp8_block"),
        (["quant=more/linear_mxfp4_fprop", *_EVALUATED], "linear_mxfp4_fprop"),
        (["quant=bf16", *_EVALUATED], "bf16"),
    ],
)
def test_the_name_is_of_what_the_run_quantises(words: list[str], expected: str) -> None:
    assert re.fullmatch(expected, str(name(*_TEN_ITERATIONS, *words)))


@pytest.mark.parametrize(
    "words",
    [
        ["quant=linear_mxfp4", "quant.rules=[{format: bf16}]"],
        ["quant=linear_mxfp4", "quant.rules=[{format: bf16, iterations: [1, 10]}]"],
        [
            "quant=linear_mxfp4",
            "quant.rules=[{layers: [0], format: bf16}, {layers: [-1], format: bf16}]",
        ],
        ["quant=bf16", "quant.rules=[{format: mxfp4, iterations: [11, null]}]"],
        [
            "quant=bf16",
            "quant.rules=[{format: mxfp4, iterations: [8, null]}]",
            "training.stop_after=7",
        ],
        [
            "quant=bf16",
            "quant.rules=[{format: mxfp4, iterations: [1, 5]}]",
            "training.start_from=a@5",
        ],
        ["quant=bf16", "quant.rules=[{format: mxfp4}, {format: bf16}]"],
        ["quant=bf16", "quant/output=mxfp8", "quant.rules=[{sites: [output], format: bf16}]"],
        ["quant=linear_mxfp4", "quant.rules=[{format: bfloat16}]"],
        ["quant=own"],
    ],
)
def test_a_scheme_that_quantises_nothing_in_the_run_is_refused(words: list[str], own: Path) -> None:
    (own / "quant" / "own.yaml").write_text(OWN + "rules: [{format: bf16}]\n")
    with pytest.raises(ConfigError) as error:
        name(*_TEN_ITERATIONS, *words, config_dir=own)
    scheme = words[0].removeprefix("quant=")
    first = 6 if "training.start_from=a@5" in words else 1
    last = 7 if "training.stop_after=7" in words else 10
    assert str(error.value) == (
        f"quant.rules of {scheme} leave nothing quantised in the 2 layers of tiny in iterations {first} to {last}; "
        "take more layers (model.num_layers=), more iterations or other rules, or quant=bf16"
    )


def test_a_format_with_all_values_of_the_working_precision_is_not_in_the_name() -> None:
    rules = "quant.rules=[{sites: [qk], format: bfloat16}]"
    assert name("quant=FA_linear_mxfp8", rules).startswith("linear_mxfp8~")
    assert (
        name("quant=FA_linear_mxfp8", rules, "training.precision=fp32")
        == "linear_mxfp8+qk_bfloat16~6e08a8"
    )


def test_a_scheme_of_the_backward_pass_is_refused_in_an_evaluation() -> None:
    words = "quant=linear_mxfp4_dgrad leaves nothing quantised in the forward pass, which is all that an evaluation has"
    with pytest.raises(ConfigError, match=words):
        name(*_TEN_ITERATIONS, "quant=more/linear_mxfp4_dgrad", *_EVALUATED)


def test_a_file_that_quantises_nothing_is_named_bf16(own: Path) -> None:
    sites = "defaults: [linear: none, qk: none, pv: none, _self_]\n"
    for text in (sites, f"{sites}name: precise\n"):
        (own / "quant" / "own.yaml").write_text(text)
        assert name("quant=own", config_dir=own) == "bf16"


def test_own_scheme_keeps_its_name(own: Path) -> None:
    assert name("quant=own", "training.seed=2", config_dir=own) == "own"


UNNAMED = OWN.replace("name: own\n", "")


IN_A_FOLDER = re.sub(r"- (linear|qk|pv):", r"- /quant/\1@\1:", UNNAMED)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("fancy", UNNAMED, "fancy"),
        ("more/fancy", IN_A_FOLDER, "fancy"),
        ("april/first/fancy", IN_A_FOLDER, "fancy"),
        ("plain", "defaults: [FA_mxfp8, _self_]\n", "plain"),
        (
            "on_more",
            "defaults: [more/FA_full_mxfp8@_here_, _self_]\npv: {format: hifp8}\n",
            "on_more",
        ),
    ],
)
def test_own_scheme_is_named_by_its_file_until_it_is_changed(
    own: Path, file: str, text: str, expected: str
) -> None:
    path = own / "quant" / f"{file}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert name(f"quant={file}", config_dir=own) == expected
    changed = name(f"quant={file}", "quant.linear.wgrad.g.format=mxfp8_e5m2", config_dir=own)
    assert changed is not None
    assert changed.startswith("linear_custom")


def test_own_file_named_as_a_shipped_scheme_in_a_folder_is_refused(own: Path) -> None:
    (own / "quant" / "linear_nvfp4.yaml").write_text(UNNAMED)
    with pytest.raises(
        ConfigError, match=r"quant\.name 'linear_nvfp4' is a shipped scheme and this"
    ):
        compose(["quant=linear_nvfp4"], own, {})


def test_own_scheme_keeps_its_name_whatever_the_model(own: Path) -> None:
    text = OWN + "rules:\n  - {layers: [20], format: bf16}\n"
    (own / "quant" / "deep.yaml").write_text(text.replace("name: own", "name: deep"))
    assert name("quant=deep", "model.num_layers=32", config_dir=own) == "deep"


def test_own_scheme_loses_its_name_when_overridden(own: Path) -> None:
    changed = name("quant=own", "quant/pv=hifp8", config_dir=own)
    assert changed is not None
    assert changed.startswith("linear_custom+pv_hifp8~")


@pytest.mark.parametrize("shipped", ["linear_mxfp8", "FA_full_mxfp8"])
def test_shipped_name_on_another_composition_is_refused(own: Path, shipped: str) -> None:
    (own / "quant" / "own.yaml").write_text(OWN.replace("name: own", f"name: {shipped}"))
    with pytest.raises(
        ConfigError, match=rf"quant\.name '{shipped}' is a shipped scheme and this composition is "
    ):
        compose(["quant=own"], own, {})


@pytest.mark.parametrize("word", ["quant.name=fancy", "+quant.name=fancy", "quant.name=FA_mxfp8"])
def test_name_on_the_command_line_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"quant\.name cannot be set to '\w+': the name follows "):
        compose([word], None, {})


def test_own_file_with_a_shipped_name_is_refused(own: Path) -> None:
    (own / "quant" / "FA_mxfp8.yaml").write_text(OWN)
    message = r"quant/FA_mxfp8\.yaml has the name of a shipped file or format, which would be taken instead"
    with pytest.raises(ConfigError, match=message):
        compose([], own, {})


def test_own_file_that_is_not_utf_8_is_named(own: Path) -> None:
    file = own / "quant" / "latin.yaml"
    file.write_bytes("# Für mich.\n".encode("latin-1") + OWN.encode())
    with pytest.raises(ConfigError) as caught:
        compose(["quant=latin"], own, {})
    assert str(caught.value) == f"{file} is not UTF-8; save it as UTF-8"


def test_resolved_experiment_has_no_sweep() -> None:
    assert not hasattr(compose([], None, {}), "sweep")


def test_the_user_s_own_model_may_have_experts(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    experts = "{num_experts: 4, top_k: 2, expert_ffn_hidden_size: 512, norm_topk_prob: true}"
    text = f"defaults: [llama32-1b]\nname: mine\nffn_hidden_size: 512\nmoe: {experts}\n"
    (tmp_path / "model" / "mine.yaml").write_text(text)
    model = compose(["model=mine"], tmp_path, {}).model
    assert model.moe is not None
    assert (model.name, model.num_layers, model.moe.top_k, model.mla) == ("mine", 16, 2, None)
