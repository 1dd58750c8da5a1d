"""The configuration groups and the choices of each, as the folders have them. Needs neither Hydra nor OmegaConf."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from quantexp.folders import conf_dir

#: Groups that are below another one; every other folder below a group holds further choices of it (`quant=more/NAME`).
_SUBGROUPS = ("quant/linear", "quant/qk", "quant/pv")
#: What a preset cuts of a model: chosen with both, never by name.
_NOT_CHOSEN = "model/cut"


@cache
def groups() -> tuple[str, ...]:
    """The groups that a word such as `model=tiny` or `quant/linear=mxfp4` may name."""
    folders = sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir())
    return (*folders, *_SUBGROUPS)


def choice_files(group: str, config_dir: Path | None) -> dict[str, Path]:
    """Choice -> its file: the shipped ones by name, then those of the user's own folder.

    A choice in a folder has the folder in its name: `more/linear_nvfp4`.
    """
    apart = {Path(folder) for folder in (*_SUBGROUPS, _NOT_CHOSEN)} - {Path(group)}
    files: dict[str, Path] = {}
    for base in filter(None, (conf_dir(), config_dir)):
        for pattern in ("*.yaml", "*/**/*.yaml"):
            for file in sorted((base / group).glob(pattern)):
                if not apart.intersection(file.relative_to(base).parents):
                    choice = file.relative_to(base / group).with_suffix("")
                    files.setdefault(choice.as_posix(), file)
    return files


def comment(file: Path) -> str:
    """The comment at the head of a file, in one line."""
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def is_shipped(group: str, choice: str) -> bool:
    """Whether a choice is one of the shipped configuration."""
    return (conf_dir() / group / f"{choice}.yaml").is_file()


def hidden_files(config_dir: Path) -> list[Path]:
    """Files of the user's folder with the name of a shipped one and another content; Hydra takes the shipped one."""
    shipped = ((file, file.relative_to(conf_dir())) for file in conf_dir().rglob("*.yaml"))
    return [
        config_dir / name
        for file, name in sorted(shipped)
        if (config_dir / name).is_file() and (config_dir / name).read_bytes() != file.read_bytes()
    ]
