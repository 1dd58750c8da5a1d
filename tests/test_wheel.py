"""The wheel contains everything that a run needs, and works from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
#: The sources of the wheel, which is built in a copy to leave the checkout unchanged.
SOURCES = ("conf", "quantexp", "launchers", "pyproject.toml", "README.md")


def pip(*words: str) -> None:
    quiet = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", *words, *quiet], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, checkout / name)
    pip("wheel", "--no-build-isolation", "--no-index", "-w", str(folder), str(checkout))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-index", "--target", str(target), str(wheel))
    return target


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheel_contains_configuration_sample_and_plugin(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"quantexp/{p.relative_to(ROOT)}" for p in (ROOT / "conf").rglob("*.yaml")}
    code = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "quantexp").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    launchers = ROOT / "launchers"
    plugin = {str(file.relative_to(launchers)) for file in launchers.rglob("*.py")}
    assert "hydra_plugins/quantexp_launcher.py" in plugin
    samples = {f"quantexp/data/sample/{name}" for name in ("wikipedia.xml", "dolma.jsonl")}
    assert conf | code | plugin | samples <= names
    assert samples <= code
    assert "hydra_plugins/__init__.py" not in names, "a namespace that other plugins share"
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "quantexp",
        "hydra_plugins",
        "quantexp_launchers",
    }


def test_console_script_launchers_and_extras_are_declared(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    declared = archive.read(name).decode()
    assert "quantexp = quantexp.cli.main:main" in declared
    assert "slurm = quantexp_launchers.slurm.launcher:SlurmLauncher" in declared
    for extra in (ROOT / "quantexp/extras").glob("*/__init__.py"):
        name = extra.parent.name
        assert f"{name} = quantexp.extras.{name}:EXTRA" in declared


def test_installed_wheel_lists_its_schemes_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    process = run(installed, tmp_path, "-m", "quantexp", "list", "schemes")
    assert process.returncode == 0, process.stderr
    assert "FA_linear_mxfp8" in process.stdout
    where = run(installed, tmp_path, "-c", "import quantexp.folders as f; print(f.conf_dir())")
    assert Path(where.stdout.strip()) == installed / "quantexp" / "conf"


def test_installed_wheel_composes_and_finds_its_launcher(installed: Path, tmp_path: Path) -> None:
    words = ["-m", "quantexp", "plan", "-m", "training=fast", "quant=bf16,FA_mxfp8"]
    process = run(installed, tmp_path, *words)
    assert process.returncode == 0, process.stderr
    assert "in all  2 runs" in process.stdout
    assert not list(tmp_path.iterdir())
