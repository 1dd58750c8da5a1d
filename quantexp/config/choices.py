"""The configuration groups and their choices, read from the folders without Hydra or OmegaConf."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from quantexp.errors import ConfigError
from quantexp.folders import conf_dir
from quantexp.formats.definitions.files import FOLDER
from quantexp.formats.table import BY_ANY_NAME

#: Groups inside another group; any other folder in a group holds more choices of it (`quant=more/NAME`).
_SUBGROUPS = ("quant/linear", "quant/qk", "quant/pv", "quant/output")
#: The reduction of a model by a preset: selected by model and preset, never by name.
NOT_CHOSEN = "model/cut"


@cache
def groups() -> tuple[str, ...]:
    """The groups that an override such as `model=tiny` or `quant/linear=mxfp4` may name."""
    folders = sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir())
    return (*folders, *_SUBGROUPS)


def choice_files(group: str, config_dir: Path | None) -> dict[str, Path]:
    """Choice -> its file: the shipped choices sorted by name, then those of the user's folder.

    The name of a choice in a folder includes the folder: `more/linear_nvfp4`.
    """
    apart = {Path(folder) for folder in (*_SUBGROUPS, NOT_CHOSEN)} - {Path(group)}
    files: dict[str, Path] = {}
    for base in filter(None, (conf_dir(), config_dir)):
        for pattern in ("*.yaml", "*/**/*.yaml"):
            for file in sorted((base / group).glob(pattern)):
                if not apart.intersection(file.relative_to(base).parents) and file.is_file():
                    choice = file.relative_to(base / group).with_suffix("")
                    files.setdefault(choice.as_posix(), file)
    return files


def comment(file: Path) -> str:
    """The comment at the head of a file, in one line; empty if the file cannot be read."""
    lines = []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def require_folder(config_dir: Path | None) -> None:
    """Refuse a user's folder that is not there; None passes.

    Raises:
        ConfigError: names it.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir must be a folder, got {str(config_dir)!r}")


def is_shipped(group: str, choice: str) -> bool:
    """Whether a choice is part of the shipped configuration."""
    return (conf_dir() / group / f"{choice}.yaml").is_file()


def hidden_files(config_dir: Path) -> list[Path]:
    """The user's files with the name of a format, or of a shipped file with other content: those are used instead."""
    shipped = ((file, file.relative_to(conf_dir())) for file in conf_dir().rglob("*.yaml"))
    named = sorted((config_dir / FOLDER).glob("*.yaml"))
    return [file for file in named if file.stem in BY_ANY_NAME] + [
        config_dir / name
        for file, name in sorted(shipped)
        if (config_dir / name).is_file() and (config_dir / name).read_bytes() != file.read_bytes()
    ]
