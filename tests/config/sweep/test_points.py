"""Every point of a sweep, composed and validated, equals the same point composed by itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from quantexp.config.compose import compose
from quantexp.config.load import save
from quantexp.config.sweep.points import compose_points
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir
from quantexp.launch.identity import identity
from quantexp.quant.scheme import SCHEMES
from quantexp.schema import CaptureLevel

from .composed import OWN, points, refusal, schemes

WIDE = [
    ["quant=glob(FA_m*)", "dataset=dolma"],
    ["quant=glob(FA*,exclude=*4)", "training=default,fast"],
    ["quant=bf16,FA_mxfp8", "quant/pv=none,hifp8", "quant/linear=mxfp4"],
    ["quant=linear_mxfp8,more/FA_full_mxfp8", "model.num_layers=range(1,3)"],
    ["quant=linear_mxfp8", "quant.linear.block=16,32", "quant.linear.wgrad.g.format=bf16"],
    ["quant=linear_mxfp4", "quant.rules=[{layers:[0],format:bf16}],[]", "training.lr=1e-3"],
    ["training.lr=1e-3,2e-3", "training.min_lr=${training.lr}", "paths.root=runs/${quant.name}"],
    ["training=fast", "capture.dir='a,b','it\\'s $(x) [y]'", "training.precision=fp16"],
    ["+experiment=short", "quant=own,FA_mxfp8", "capture=tensors"],
    ["training.seed=1", "training.seed=2,3", "training.lr=1e-4", "training.lr=2e-4"],
    ["training=fast", "~capture", "++training.seed=1,2"],
]


@pytest.mark.slow
@pytest.mark.parametrize("words", WIDE, ids=lambda words: " ".join(words))
def test_point_equals_its_overrides_composed_here_and_by_hydra_alone(
    own: Path, words: list[str]
) -> None:
    sweep = points(*words, config_dir=own)
    assert len(sweep) > 1
    for point in sweep:
        assert compose(point.overrides, own, {}) == point.experiment
        with initialize_config_dir(str(conf_dir().absolute()), version_base="1.3"):
            search = "hydra.searchpath=['file://" + str(own).replace("'", "\\'") + "']"
            config = hydra_compose("config", [search, *point.overrides])
        plain = OmegaConf.to_container(config, resolve=True)
        assert isinstance(plain, dict)
        assert without_completed(asdict(point.experiment)) == without_completed(plain)


def without_completed(plain: dict[Any, Any]) -> dict[Any, Any]:
    """The configuration without the sweep and the values that are completed after the composition."""
    plain.pop("sweep", None)
    for section, keys in (
        ("quant", ["name"]),
        ("model", ["vocab_size"]),
        ("dataset", ["label", "sample", "split", "tokenizer"]),
        ("launcher", ["num_processes"]),
    ):
        for key in keys:
            plain[section].pop(key)
    return plain


def test_sweep_leaves_no_trace_in_a_point(tmp_path: Path) -> None:
    sweeping = [
        "sweep.seeds=2",
        "sweep.first={quant: bf16}",
        "quant=bf16,FA_mxfp8",
        "training=fast",
    ]
    point = points(*sweeping)[0]
    alone = compose(["quant=bf16", "training=fast"], None, {})
    assert point.experiment == alone
    assert identity(point.experiment, "cpu") == identity(alone, "cpu")
    save(point.experiment, tmp_path / "config.yaml")
    assert "sweep" not in (tmp_path / "config.yaml").read_text()


def test_points_share_no_mutable_values() -> None:
    one, other = points("training=fast", "training.seed=1,2")
    one.experiment.quant.linear.fprop.x.format = "changed"
    one.experiment.model.num_layers = 99
    assert other.experiment.quant.linear.fprop.x.format is None
    assert other.experiment.model.num_layers == 2


def test_glob_is_exactly_the_ten_schemes(in_tmp: Path) -> None:
    names = schemes("quant=glob(*)", "model.num_layers=1")
    assert len(names) == len(SCHEMES) == 10
    assert set(names) == set(SCHEMES)
    assert not list(in_tmp.iterdir()), "a sweep leaves no file of Hydra's behind"


def test_glob_finds_the_users_own_choices_too(own: Path) -> None:
    assert schemes("quant=glob(o*)", config_dir=own) == ["own"]


def test_last_word_varies_fastest() -> None:
    sweep = points("training.seed=1,2", "quant=bf16,FA_mxfp8", "training=fast")
    assert [(p.experiment.training.seed, p.experiment.quant.name) for p in sweep] == [
        (1, "bf16"),
        (1, "FA_mxfp8"),
        (2, "bf16"),
        (2, "FA_mxfp8"),
    ]
    assert sweep[1].overrides == ["training.seed=1", "quant=FA_mxfp8", "training=fast"]


def test_nothing_swept_is_one_point() -> None:
    (point,) = points("quant=FA_mxfp8")
    assert (point.overrides, point.stage) == (["quant=FA_mxfp8"], 0)


def test_zipped_keys_are_not_multiplied() -> None:
    sweep = points("quant=bf16,FA_mxfp8", "training.lr=1e-3,1e-4", "sweep.zip=[quant, training.lr]")
    assert [(p.experiment.quant.name, p.experiment.training.lr) for p in sweep] == [
        ("bf16", 1e-3),
        ("FA_mxfp8", 1e-4),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["sweep.seeds=3"], [1234, 1235, 1236]),
        (["sweep.seeds=2", "training.seed=5"], [5, 6]),
        (["sweep.seeds=[7, 1]"], [7, 1]),
        (["sweep.seeds=1"], [1234]),
    ],
)
def test_seeds_multiply_the_points(words: list[str], seeds: list[int]) -> None:
    sweep = points("quant=bf16,FA_mxfp8", *words)
    assert [(p.experiment.quant.name, p.experiment.training.seed) for p in sweep] == [
        (scheme, seed) for scheme in ("bf16", "FA_mxfp8") for seed in seeds
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sweep.seeds=[1,2]", "training.seed=5"],
            "sweep.seeds=[1, 2] and training.seed=5 both set training.seed; give one of them",
        ),
        (
            ["sweep.seeds=2", "training.seed=5,6"],
            "sweep.seeds=2 and training.seed=5 both set training.seed; give one of them",
        ),
        (
            ["sweep.chaos=1", "training.chaos=3,4"],
            "sweep.chaos=1 and training.chaos=3 both set training.chaos; give one of them",
        ),
        (
            ["sweep.chaos=0", "training.chaos=3"],
            "sweep.chaos=0 and training.chaos=3 both set training.chaos; give one of them",
        ),
        (
            ["sweep.seeds=1,2"],
            "sweep.seeds=1,2: sweep.seeds is one for the whole sweep; write a list as sweep.seeds=[a,b]",
        ),
        (
            ["sweep.seed=2"],
            "unknown key sweep.seed; did you mean seeds? allowed in sweep: zip, poi",
        ),
        (
            ["+sweep.seed=2"],
            "unknown key sweep.seed; did you mean seeds? allowed in sweep: zip, po",
        ),
        (["sweep.points=[1]"], "sweep.points must be one value, got [1]"),
        (["quant=glob(z*)"], "quant=glob(z*) stands for no value; available: FA_hifp8, FA_linear_"),
        (["quantt=glob(*)"], "quantt=glob(*) stands for no value: there is no group quantt"),
        (["hydra/sweeper=other"], "hydra/sweeper=other: no such choice; available: basic"),
        (["hydra.sweeper._target_=x"], "hydra/sweeper must be basic, got x"),
    ],
)
def test_impossible_sweep_is_refused(words: list[str], message: str) -> None:
    assert refusal(*words).startswith(message)


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """The override that names a file of two explicit points."""
    file = tmp_path / "points.yaml"
    file.write_text("- {quant: FA_mxfp8, training.lr: 1e-4}\n- {quant: bf16, quant/pv: mxfp8}\n")
    return f"sweep.points={file}"


def test_explicit_points_are_combined_with_the_other_words(listed: str) -> None:
    sweep = points("training=default,fast", listed, "sweep.seeds=[1]")
    assert [(p.experiment.quant.name, p.experiment.training.name) for p in sweep] == [
        ("FA_mxfp8", "default"),
        ("FA_mxfp8", "fast"),
        ("pv_mxfp8", "default"),
        ("pv_mxfp8", "fast"),
    ]
    assert sweep[0].experiment.training.lr == 1e-4
    assert {p.experiment.training.seed for p in sweep} == {1}


def test_relative_file_is_below_the_working_directory(in_tmp: Path) -> None:
    (in_tmp / "p.yaml").write_text("- {quant: FA_mxfp8}\n")
    assert schemes("sweep.points=p.yaml") == ["FA_mxfp8"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "{quant: FA_mxfp9}",
            "quant=FA_mxfp9: no such choice; did you mean FA_mxfp4 or FA_mxfp8? ",
        ),
        ("{training.lrr: 1}", "unknown key training.lrr; did you mean lr?"),
        ("{+training.lrr: 1}", "unknown key training.lrr; did you mean lr?"),
        ("{training.lr: abc}", "training.lr must be a number, got 'abc'"),
        ("{training.seed: -1}", "training.seed must be at least 0, got -1"),
        ("{training.seed: [1, 2]}", "training.seed"),
    ],
)
def test_mistake_in_the_file_is_named_with_its_entry(
    tmp_path: Path, entry: str, message: str
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"- {{quant: bf16}}\n- {entry}\n")
    error = refusal(f"sweep.points={file}", "training.min_lr=1e-5,1e-6")
    assert error.startswith(f"{file}, entry 2: {message}")


def test_seeds_beside_an_entrys_own_seed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("- {quant: bf16}\n- {training.seed: 3}\n")
    message = refusal(f"sweep.points={tmp_path / 'p.yaml'}", "sweep.seeds=2")
    assert message == "sweep.seeds=2 and training.seed=3 both set training.seed; give one of them"


def test_yaml_file_defines_a_sweep(own: Path) -> None:
    sweep = points("+experiment=swept", config_dir=own)
    assert [(p.stage, p.experiment.quant.name, p.experiment.training.seed) for p in sweep] == [
        (0, "FA_mxfp8", 5),
        (0, "FA_mxfp8", 6),
        (1, "bf16", 5),
        (1, "bf16", 6),
    ]
    for point in sweep:
        assert compose(point.overrides, own, {}) == point.experiment


def test_command_line_replaces_the_values_of_the_file(own: Path) -> None:
    words = ["quant=linear_mxfp8", "sweep.first={dataset: wikipedia}", "sweep.seeds=null"]
    (point,) = points("+experiment=swept", *words, config_dir=own)
    assert (point.stage, point.experiment.quant.name) == (0, "linear_mxfp8")


def test_whole_section_may_be_set_at_once() -> None:
    assert len(points("sweep={seeds: 2, exclude: {quant: bf16}}", "quant=bf16,FA_mxfp8")) == 2


def test_shipped_sweep_of_the_ten_schemes_runs_bf16_first() -> None:
    sweep = points("+experiment=ten_schemes")
    assert [p.experiment.quant.name for p in sweep] == list(SCHEMES)
    assert [p.stage for p in sweep] == [0] + [1] * 9


def test_swept_files_cannot_set_the_sweep_itself(own: Path) -> None:
    message = refusal("+experiment=short,swept", config_dir=own)
    assert message == (
        "its files say something else about `sweep` than those of the whole sweep; what is swept cannot set `sweep` "
        "itself (point +experiment=swept)"
    )


def test_sweep_key_among_the_swept_words_of_a_file_is_refused(own: Path) -> None:
    text = "# @package _global_\nhydra: {sweeper: {params: {sweep.seeds: '2'}}}\n"
    (own / "experiment" / "odd.yaml").write_text(text)
    message = refusal("+experiment=odd", config_dir=own)
    assert message == "hydra.sweeper.params: sweep.seeds=2 belongs below `sweep:`"


@pytest.mark.slow
def test_each_point_is_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[list[str]] = []

    def counted(name: str, words: list[str], **options: Any) -> Any:
        composed.append(words)
        return hydra_compose(name, words, **options)

    monkeypatch.setattr("quantexp.config.compose.hydra_compose", counted)
    monkeypatch.setattr("quantexp.config.sweep.variants.hydra_compose", counted)
    assert len(points("quant=bf16,FA_mxfp8", "training.seed=range(1,4)")) == 6
    assert len(composed) == 1 + 6, "what all share, and every point"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quant=bf16,FA_mxfp9"], "quant=FA_mxfp9: no such choice"),
        (
            ["training.lr=1e-3,abc"],
            "training.lr must be a number, got 'abc' (point training.lr=abc)",
        ),
        (
            ["training.seed=1,-1"],
            "training.seed must be at least 0, got -1 (point training.seed=-1)",
        ),
        (
            ["quant=linear_mxfp8", "quant.linear.block=32,24"],
            "quant.linear.block must be a power of",
        ),
        (["quant=bf16,FA_mxfp8", "quant.name=bf16"], "quant.name cannot be set to 'bf16'"),
        (["+training.lrr=1,2"], "unknown key training.lrr; did you mean lr?"),
        (["quant={a,b"], "cannot read the override 'quant={a,b': "),
    ],
)
def test_bad_last_point_is_refused_and_named(words: list[str], message: str) -> None:
    assert refusal(*words).startswith(message)


@pytest.mark.slow
def test_bad_own_scheme_as_last_point_names_its_file(own: Path) -> None:
    file = own / "quant" / "typo.yaml"
    file.write_text(OWN.replace("dgrad", "dgard"))
    message = refusal("quant=own,typo", config_dir=own)
    assert message.startswith(f"{file}: unknown key quant.linear.dgard; did you mean dgrad?")


def test_own_scheme_keeps_its_name_in_a_sweep(own: Path) -> None:
    assert schemes("quant=bf16,own", config_dir=own) == ["bf16", "own"]


def test_variables_apply_to_every_point_of_a_sweep() -> None:
    environment = {"CUSTOM_QUANT_TYPE": "mxfp4", "TENSOR_SAVE_ENABLED": "off"}
    experiments = [p.experiment for p in compose_points(["training.seed=1,2"], None, environment)]
    assert [e.quant.name for e in experiments] == ["FA_linear_mxfp4", "FA_linear_mxfp4"]
    assert {e.capture.level for e in experiments} == {CaptureLevel.off}
    assert [e.training.seed for e in experiments] == [1, 2]


def test_variable_is_part_of_a_points_overrides() -> None:
    (point,) = compose_points([], None, {"CUSTOM_QUANT_TYPE": "mxfp4"})
    assert compose(point.overrides, None, {}) == point.experiment


def test_variable_beside_a_swept_scheme_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"CUSTOM_QUANT_TYPE=mxfp8 .* and quant=bf16,FA_mxfp8 di"):
        compose_points(["quant=bf16,FA_mxfp8"], None, {"CUSTOM_QUANT_TYPE": "mxfp8"})


def test_variable_beside_another_scheme_in_the_file_of_points_is_an_error(listed: str) -> None:
    with pytest.raises(ConfigError, match=r"CUSTOM_QUANT_TYPE=bf16 .* and quant='FA_mxfp8' differ"):
        compose_points([listed], None, {"CUSTOM_QUANT_TYPE": "bf16"})


def test_product_of_too_many_points_is_refused_before_it_is_built() -> None:
    words = ["training.seed=range(0,1000)", "training.iterations=range(1000,2000)"]
    with pytest.raises(
        ConfigError, match="a sweep must have at most 10,000 points, got 1,000,000;"
    ):
        points(*words)
