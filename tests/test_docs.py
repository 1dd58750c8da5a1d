"""Executes what the documentation tells users to type.

    bash, text    commands: `quantexp ...`, in text after a `$`; those that train or plan are composed, `list` is
                  executed, those about runs are executed on small runs (slow)
    python        executed; a block that opens a run, on the small runs (slow)
    yaml          `<!-- FILE -->` before it is the file that the page's commands read; without a name it is composed

A comment before a block says why it is not executed: `<!-- not run: needs SLURM -->`. `.ci/run` executes the blocks of
the README that have a name. A lone `...` in a command stands for anything else. All commands in backticks of the
section about the old scripts are tested as if they stood in a block.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from quantexp.analysis.draw.arguments import request_of as draw_request
from quantexp.cli.arguments import parser_of
from quantexp.cli.jobs import cluster_of
from quantexp.cli.main import main
from quantexp.cli.plan_backend import device_of
from quantexp.config.compose import compose
from quantexp.config.sweep.points import compose_points
from quantexp.extras.requantise.arguments import request_of as requantise_request
from quantexp.launch.identity import folder_name, identity

from .documents import (
    ABOUT_RUNS,
    CI_BLOCKS,
    COMPOSED,
    DOCS,
    FENCE,
    NOT_RUN,
    OLD_SCRIPTS,
    PAGES,
    README,
    Command,
    blocks,
    blocks_of,
    command_lines,
    command_of,
    commands,
    lines,
    name_of,
    section,
)

LINK = re.compile(r"\]\((?!https?://)(?P<file>[^)#]*)(?:#(?P<heading>[^)]*))?\)")

#: Schemes of the small runs that commands about runs are executed on.
SCHEMES = ("bf16", "FA_mxfp8", "FA_hifp8", "FA_linear_mxfp8", "FA_linear_mxfp4", "FA_linear_hifp8")
#: A run's folder or a part of its name, as the pages write them.
RUN = re.compile(rf"(?:llama32-1b_wikipedia_|\b)({'|'.join(SCHEMES)})-(?:[0-9a-f]{{4,8}}\b|\.\.\.)")


def check(command: Command) -> None:
    """Compose the experiments that it would train; of other commands, parse the words."""
    arguments = parser_of(command.verb).parse_intermixed_args(list(command.words))
    if command.verb in ("draw", "requantise"):
        cluster_of(arguments)
    if command.verb == "draw":
        draw_request(arguments)
    elif command.verb == "requantise":
        requantise_request(arguments)
    elif command.verb not in COMPOSED:
        pass
    elif getattr(arguments, "multirun", False):
        points = compose_points(arguments.words, arguments.config_dir, {})
        assert command.points in (None, len(points))
    else:
        compose(device_of(arguments.words)[0], arguments.config_dir, {})


def write_files(page: Path) -> None:
    """The YAML files that the page gives a name."""
    for block in blocks(page):
        if block.language == "yaml" and block.name:
            Path(block.name).parent.mkdir(parents=True, exist_ok=True)
            Path(block.name).write_text(block.text)


def pages(pattern: str, *languages: str) -> list[Path]:
    """The pages with such a block that has the pattern."""
    return [
        page
        for page in PAGES
        if any(
            block.is_run
            and block.language in languages
            and re.search(pattern, "\n".join(lines(block)))
            for block in blocks(page)
        )
    ]


#: Whether a block of commands needs runs, as well as a pattern can tell; `Command.needs_runs` decides.
_NEEDS_RUNS = rf"runs/|quantexp ({'|'.join(ABOUT_RUNS)}) "


#: All but the page that explains them and the benchmarks, which name schemes only in results.
EXPLAINED = [page for page in PAGES if page.name not in ("glossary.md", "benchmarks.md")]
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in titles
    }


@every_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = list(LINK.finditer(text))
    assert len(links) == text.count("](") - text.count("](http")
    for link in links:
        target = page.parent / link["file"] if link["file"] else page
        assert target.exists(), link[0]
        assert not link["heading"] or link["heading"] in headings(target), link[0]


@every_page
def test_every_block_is_executed_or_states_why_not(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("bash", "python", "yaml", "text"), block.text
        assert block.comment != NOT_RUN.strip(), block.text
        if block.name in CI_BLOCKS:
            assert page == README, f"{block.name} on {page} is executed by nobody"
    for command in commands(page):
        assert command.verb in (*COMPOSED, *ABOUT_RUNS, "list") or "--help" in command.words


@pytest.mark.parametrize("page", EXPLAINED, ids=name_of)
def test_slots_and_fa_are_explained_where_a_page_first_uses_them(page: Path) -> None:
    text = page.read_text()
    first = re.search(r"FA_|\bFA\b|\bslots?\b|\bfprop\b|\bdgrad|\bwgrad\b", text)
    if first is not None:
        paragraph = text.find("\n\n", first.start())
        before = text[: paragraph if paragraph >= 0 else None]
        assert "glossary.md" in before, text[first.start() :].partition("\n")[0]


def test_extras_are_named_as_pip_finds_them() -> None:
    """pip 23.2, which Python 3.11 brings, finds an extra only by its normal form."""
    root = DOCS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in extras)
    sources = [root / "pyproject.toml", root / "CONTRIBUTING.md", *PAGES]
    for folder in ("quantexp", "launchers", "benchmarks"):
        sources += sorted((root / folder).rglob("*.py"))
    used = {
        name: file
        for file in sources
        for names in re.findall(r"(?:\bquantexp|'\.)\[([a-z][\w,.-]*)\]", file.read_text())
        for name in names.split(",")
    }
    assert used.keys() - extras == set(), used
    assert "lm-eval" in used


def test_every_page_is_on_the_map() -> None:
    listed = re.findall(r"^- \[.+\]\((.+\.md)\): ", README.read_text(), re.MULTILINE)
    pages = {name_of(page) for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages | {"CONTRIBUTING.md", "CHANGELOG.md"})


def test_readme_prints_the_folder_of_the_run_that_its_command_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The run in the README is of a CPU with AVX-512; another, which multiplies in fp32, has another number.
    monkeypatch.setattr("quantexp.launch.identity.multiplies_natively", lambda _: True)
    (main_command,) = (
        line for line in README.read_text().splitlines() if line.startswith("quantexp model=")
    )
    experiment = compose(shlex.split(main_command)[1:], None, {})
    name = folder_name(experiment, identity(experiment, "cpu"))
    printed = re.findall(
        r"^(?:run|picture|report) +runs/([^/\s]+)", README.read_text(), re.MULTILINE
    )
    assert printed == [name] * 3
    assert f"quantexp draw runs/{name}" in (DOCS / "draw.md").read_text()


@every_page
def test_commands_of_a_page_are_commands(
    page: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(page)
    for command in dict.fromkeys(commands(page)):
        if page.name == "benchmarks.md":
            # Its commands measure: sweeps of 60 points take seconds to compose. Their words are parsed.
            parser_of(command.verb).parse_intermixed_args(list(command.words))
        elif command.verb == "list":
            assert main([command.verb, *command.words]) == 0
        elif not (command.needs_runs and command.verb in COMPOSED):
            check(command)


def test_every_sweep_of_the_section_of_sweeps_states_its_number_of_points() -> None:
    page = DOCS / "launching.md"
    found = command_lines(blocks_of(section(page, "Sweeps"), page))
    sweeps = [one for one in map(command_of, found) if one.verb == "train"]
    assert len(sweeps) > 10
    assert all("-m" in command.words for command in sweeps)
    assert all(command.points for command in sweeps)


def test_the_section_about_old_scripts_names_every_command_file_and_flag_of_the_old_scripts() -> (
    None
):
    text = section(DOCS / "commands.md", OLD_SCRIPTS)
    old = """
        single batch quick collect visualize both
        run_single run_tensor_collection run_tensor_draw quick_visualize one_click
        train_config.py flash_attention_config.py quant_type_modifier.py
        control_iter collect_micro_batches CUSTOM_QUANT_TYPE TENSOR_SAVE_DIR TENSOR_SAVE_ENABLED
        --quant-type --fa-quantization --linear-quant --qk-quant --pv-quant --check --mode --tensor-dir --output-dir
        --restore --training-config --control-iter --dry-run --list
    """
    assert [word for word in old.split() if f"`{word}" not in text] == []


@pytest.mark.parametrize("page", pages("", "yaml"), ids=name_of)
def test_yaml_of_a_page_is_a_part_of_an_experiment(page: Path, in_tmp: Path) -> None:
    Path("mine/experiment").mkdir(parents=True)
    for block in blocks(page):
        if block.language == "yaml" and block.is_run and not block.name:
            Path("mine/experiment/block.yaml").write_text(f"# @package _global_\n{block.text}")
            compose(["+experiment=block"], Path("mine"), {})


@pytest.mark.parametrize("page", pages("", "python"), ids=name_of)
def test_python_of_a_page_runs(page: Path, in_tmp: Path) -> None:
    run_python(page, lambda text: text, needs_runs=False)


def run_python(page: Path, change: Callable[[str], str], *, needs_runs: bool) -> None:
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python" and block.is_run and block.needs_runs is needs_runs:
            exec(compile(change(block.text), str(page), "exec"), names)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_words: list[str]) -> Iterator[Path]:
    """A folder with a small run of each of SCHEMES, with tensors and a saved model, and the list of their sweep."""
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    folder = tmp_path_factory.mktemp("docs")
    words = [*tiny_words, "capture=tensors", "checkpoint.at_end=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for scheme in SCHEMES:
            experiment = compose([*words, f"quant={scheme}"], None, {})
            with open_run(experiment, "cpu", ["test"]) as (attempt, _):
                assert Worker(attempt.run, experiment).run() == 0
        # All are completed, so that the sweep skips them and writes its list.
        assert main(["-m", *words, f"quant={','.join(SCHEMES)}"]) == 0
        yield folder


def with_real_runs(text: str) -> str:
    """The text with the small runs instead of those that the page names."""
    real = {name.partition("wikipedia_")[2].rpartition("-")[0]: name for name in _runs()}
    text = RUN.sub(lambda match: real[match[1]], text)
    text = re.sub(r"runs/sweeps/[\w]+\.json", str(next(Path("runs/sweeps").glob("*.json"))), text)
    return re.sub(r"\b(RUN|DIR|FOLDER)\b", f"runs/{real['FA_linear_mxfp8']}", text)


def _runs() -> list[str]:
    return [folder.name for folder in Path("runs").glob("llama*")]


def expanded(word: str) -> list[str]:
    """The files to which the shell expands a pattern."""
    return (
        sorted(map(str, Path().glob(word))) if word.startswith("runs/") and "*" in word else [word]
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages(_NEEDS_RUNS, "bash", "text"), ids=name_of)
def test_commands_about_runs_do_what_the_page_says(
    page: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in dict.fromkeys(commands(page)):
        if not command.needs_runs:
            continue
        words = [one for word in command.words for one in expanded(with_real_runs(word))]
        if command.verb in COMPOSED or "launcher=slurm" in words:
            check(Command(command.verb, tuple(words)))
            continue
        if command.verb == "draw" and not any(word.startswith("module=") for word in words):
            words.append("module=fc1")
        assert main([command.verb, *words]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages("runs/", "python"), ids=name_of)
def test_python_about_runs_runs(page: Path, work: Path) -> None:
    run_python(page, with_real_runs, needs_runs=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_works_from_its_first_command_to_its_last(
    in_tmp: Path, tiny_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "tutorial.md"
    write_files(page)
    for command in commands(page):
        words = list(command.words)
        if command.verb == "train":
            words += [
                "training.iterations=2",
                "training.warmup_iterations=1",
                "analysis.auto=false",
            ]
            words += ["quant=bf16,wgrad_mxfp4", "sweep.seeds=2", tiny_words[-1]]
        assert main([command.verb, *words]) == 0, capsys.readouterr().err
    output = capsys.readouterr().out
    heading = re.search("^gap to bf16: mean loss of iterations", page.read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[0] in output
    assert "needs 3 seeds or more" in output, "it has two seeds here"


def test_a_block_that_is_neither_run_nor_marked_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```bash\nrm -rf runs\n```\n")
    with pytest.raises(AssertionError, match="say why in a comment before the block"):
        commands(page)
    page = tmp_path / "marked.md"
    page.write_text("<!-- not run: deletes runs -->\n```bash\nrm -rf runs\n```\n")
    assert commands(page) == []


def test_every_shipped_yaml_of_a_page_has_a_mapping_or_a_list() -> None:
    texts = [block.text for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert len(texts) > 5
    assert all(isinstance(yaml.safe_load(text), dict | list) for text in texts)
