"""Rules of the layout beyond import-linter: no circle among files, and rooms that start without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import grimp
import pytest

import quantexp

PACKAGE = Path(quantexp.__file__).parent
#: Rooms whose modules the command line imports before it knows whether it needs torch.
WITHOUT_TORCH = (
    *("cli", "config", "launch", "memory", "model", "reading", "runs", "schema", "terminal"),
)
_IMPORT = """\
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"
"""


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module."""
    reached = {name: {name} for name in imports}
    changed = True
    while changed:
        changed = False
        for name, direct in imports.items():
            more = set().union(*(reached.get(other, set()) for other in direct))
            if not more <= reached[name]:
                reached[name] |= more
                changed = True
    together = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in imports
    }
    return [set(circle) for circle in together if len(circle) > 1]


def test_circle_is_detected() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


def test_no_two_files_import_each_other() -> None:
    """Imports inside functions count, and so do those for types alone."""
    graph = grimp.build_graph("quantexp", "quantexp_launchers", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert not circles(imports)


#: Packages that an environment without extras of pyproject.toml may lack, and the parts that ask for them by name.
OPTIONAL = {
    "en_dtypes": "quantexp.extras.verify.oracles",
    "gfloat": "quantexp.extras.verify.oracles",
    "lm_eval": "quantexp.extras.evaluate.tasks quantexp.config.tasks",
    "ml_dtypes": "quantexp.extras.verify.oracles",
    "mlflow": "quantexp.training.tracking.mlflow",
    "pandas": "quantexp.capture.reader",
    "torchao": "quantexp.extras.verify.oracles",
    "transformer_engine": "quantexp.extras.transformer_engine",
    "triton": "quantexp.formats.kernels quantexp.capture.statistics quantexp.quant.attention",
    "wandb": "quantexp.training.tracking.wandb",
}


def test_packages_that_users_may_lack_are_imported_where_that_is_handled() -> None:
    """The environment of these tests has more packages than README's main command installs."""
    graph = grimp.build_graph(
        "quantexp", "quantexp_launchers", include_external_packages=True, cache_dir=None
    )
    required = {
        re.split(r"[<>=!~; \[]", line, maxsplit=1)[0].lower().replace("_", "-")
        for line in requires("quantexp") or ()
        if "extra ==" not in line
    } | {"markupsafe"}  # of Jinja2
    distributions = packages_distributions()
    for package in graph.modules:
        if package in sys.stdlib_module_names or package.startswith("quantexp"):
            continue
        of = {name.lower().replace("_", "-") for name in distributions.get(package, ())}
        if not of & required:
            importers = graph.find_modules_that_directly_import(package)
            places = tuple(OPTIONAL.get(package, "nowhere").split())
            elsewhere = {name for name in importers if not name.startswith(places)}
            assert not elsewhere, (package, elsewhere)


_COMPOSE = """\
import sys
from quantexp.config.compose import compose
compose(sys.argv[1:])
print(*(name for name in sys.modules if name.startswith("quantexp")))
"""


def test_composing_the_main_command_needs_at_most_70_files() -> None:
    """What a stranger reads to know how words become an experiment; what a key asks for is imported with the key."""
    words = ["model=llama32-1b", "dataset=wikipedia", "quant=FA_linear_mxfp8", "training=fast"]
    files = _files_of([sys.executable, "-c", _COMPOSE, *words])
    assert "quantexp.config.validate.experiment" in files
    assert len(files) <= 70, sorted(files)


def _files_of(command: list[str], **variables: str) -> list[str]:
    """The modules that a program prints."""
    process = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | variables
    )
    return process.stdout.split()


_QUANTISE = """\
import sys, torch
from quantexp.formats import quantise
quantise(torch.ones(32, dtype=torch.bfloat16), sys.argv[1])
print(*(name for name in sys.modules if name.partition(".")[0] == "quantexp"))
"""


@pytest.mark.parametrize("code", ["compiled", "torch"])
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_quantising_a_tensor_needs_at_most_15_files(fmt: str, code: str) -> None:
    """What a stranger reads to know how one number is rounded."""
    variables = {"QUANTEXP_COMPILE": "0"} if code == "torch" else {}
    files = _files_of([sys.executable, "-c", _QUANTISE, fmt], **variables)
    assert "quantexp.formats.quantising" in files
    assert len(files) <= 15, files


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_room_imports_no_torch_until_it_needs_it(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files]
    names = [".".join(part).removesuffix(".__init__") for part in parts]
    process = subprocess.run(
        [sys.executable, "-c", _IMPORT, *names], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_no_file_grows_past_350_lines() -> None:
    lengths = {
        str(file): len(file.read_text().splitlines())
        for folder in (PACKAGE, PACKAGE.parent / "launchers")
        for file in folder.rglob("*.py")
    }
    assert {file: length for file, length in lengths.items() if length > 350} == {}


@pytest.mark.parametrize(
    ("private", "wrapper"),
    [("hydra._internal", "config/hydra_internals.py"), ("torch._C", "formats/torch_internals.py")],
)
def test_private_modules_of_a_library_are_used_in_one_file(private: str, wrapper: str) -> None:
    files = (file for file in PACKAGE.rglob("*.py") if private in file.read_text())
    assert [str(file.relative_to(PACKAGE)) for file in files] == [wrapper]
