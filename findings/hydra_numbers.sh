#!/usr/bin/env bash
# hydra-core 1.3.8, omegaconf 2.3.1: the same text is a number on the command line and a string in YAML, or the reverse.
#
# Guess: both read nan, inf and -.5 as floats; 0123 is 123 on the command line; 1:30 is a string.
# Seen, as key=TEXT and as "key: TEXT" in a file:
#   nan, inf       float            str
#   .nan, .inf     str              float
#   -.5            float            str
#   0123           str              83
#   0x10, 0b11     str              16, 3
#   1:30           str              90
#   yes, on        str              True
#   1e-3_0         1e-30            str
# Why it matters: without a declared type, clip: inf in a file is text, and a label such as 0123 or 12:30 becomes a
#       number in one place only. A dataclass as schema turns both into its type, if the text can be read so.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'hydra-core==1.3.8' 'omegaconf==2.3.1'
"$environment/bin/python" -W ignore - <<'END'
import math
import pathlib
import tempfile

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

expected = {
    "nan": (math.nan, "nan"),
    "inf": (math.inf, "inf"),
    ".nan": (".nan", math.nan),
    ".inf": (".inf", math.inf),
    "-.5": (-0.5, "-.5"),
    "0123": ("0123", 83),
    "0x10": ("0x10", 16),
    "0b11": ("0b11", 3),
    "1:30": ("1:30", 90),
    "yes": ("yes", True),
    "on": ("on", True),
    "1e-3_0": (1e-30, "1e-3_0"),
    "1e-3": (0.001, 0.001),
    "1_000": (1000, 1000),
}
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.yaml").write_text("key: null\n")
    with initialize_config_dir(folder, version_base="1.3"):
        for text, values in expected.items():
            seen = (compose("config", [f"key={text}"]).key, OmegaConf.create(f"key: {text}").key)
            print(text, seen)
            assert repr(seen) == repr(values), text
END
