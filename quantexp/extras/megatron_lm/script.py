"""`python -m quantexp.megatron_lm pretrain_gpt.py ...`: Megatron-LM's script, with quantexp's words among its own.

    --quantexp-quant SCHEME     as QUANTEXP_QUANT
    --quantexp-capture CAPTURE  as QUANTEXP_CAPTURE
    --quantexp-gradient BY      as QUANTEXP_GRADIENT
    --quantexp-dir FOLDER       as QUANTEXP_DIR

They are taken out before Megatron-LM reads its arguments, and `--spec quantexp.megatron_lm SPEC` is added. Nothing else
differs from the script by itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from quantexp.errors import ConfigError, QuantexpError

#: Word -> the variable that it sets.
WORDS = {
    "--quantexp-quant": "QUANTEXP_QUANT",
    "--quantexp-capture": "QUANTEXP_CAPTURE",
    "--quantexp-gradient": "QUANTEXP_GRADIENT",
    "--quantexp-dir": "QUANTEXP_DIR",
}
_SPEC = ["--spec", "quantexp.megatron_lm", "SPEC"]


def main(words: list[str]) -> None:
    """Run a script with the words after it."""
    try:
        script, arguments, variables = parsed(words)
    except QuantexpError as error:
        raise SystemExit(f"quantexp: {error}") from None
    os.environ.update(variables)
    sys.path[0] = str(script.parent)  # as Python itself does for a script
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def parsed(words: list[str]) -> tuple[Path, list[str], dict[str, str]]:
    """The script, Megatron-LM's arguments and the variables of quantexp's own words.

    Raises:
        ConfigError: there is no script, an own word is unknown or has no value, or another spec or loop is asked for.
    """
    if not words or not words[0].endswith(".py") or not Path(words[0]).is_file():
        raise ConfigError(
            "the first word must be Megatron-LM's script, such as pretrain_gpt.py, got "
            f"{words[0] if words else 'nothing'}"
        )
    rest, arguments, variables = iter(words[1:]), [], {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("--quantexp"):
            arguments.append(word)
            continue
        if name not in WORDS:
            raise ConfigError(f"{name} is unknown; there are {', '.join(WORDS)}")
        value = value if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{name} needs a value")
        variables[WORDS[name]] = value
    if "--use-legacy-models" in arguments:
        raise ConfigError("--use-legacy-models builds layers that no --spec describes; drop it")
    if "--spec" not in arguments:
        arguments += _SPEC
    elif "quantexp.megatron_lm" not in arguments:
        raise ConfigError(
            "--spec names other layers than quantexp's; drop it, or run the script by itself"
        )
    return Path(words[0]).absolute(), arguments, variables


if __name__ == "__main__":
    main(sys.argv[1:])
