#!/usr/bin/env bash
# Collects what quantexp and its GPU tests need, as wheels for a machine with Python 3.12 that reaches no package index.
#
#   benchmarks/gpu_wheels.sh FOLDER [REQUIREMENT ...]
#
# The requirements are what the machine has; they and all that they require are left out. Default: torch==2.11.0 numpy.
# With matplotlib and tensorboard, too, the folder has half the size. `python benchmarks/on_gpu.py --wheels FOLDER`
# installs there what is missing.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
present=("${@:2}")
[ ${#present[@]} -gt 0 ] || present=(torch==2.11.0 numpy)
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

target=(--python-version 3.12 --implementation cp --platform manylinux2014_x86_64 --only-binary=:all:)
for minor in $(seq 34 -1 5); do target+=(--platform "manylinux_2_${minor}_x86_64"); done
grep -v -e '^torch==' -e '^triton==' constraints.txt > "$work/constraints.txt"
options=("${target[@]}" --find-links "$folder" -c "$work/constraints.txt")

# names REQUIREMENT...: what pip would install there, a name and a version a line.
names() {
  pip install --quiet --dry-run --ignore-installed --report "$work/report.json" --target "$work/none" "${options[@]}" "$@"
  python - "$work/report.json" <<'END'
import json, sys
for each in json.load(open(sys.argv[1]))["install"]:
    print(f"{each['metadata']['name']}=={each['metadata']['version']}")
END
}

# The only requirement without a wheel; it is pure Python.
pip wheel --quiet --no-deps --wheel-dir "$folder" antlr4-python3-runtime==4.9.3
requirements=$(python - <<'END'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
own = [each for each in extras["gpu"] if not each.startswith("quantexp")]
print("\n".join(project["dependencies"] + extras["verify"] + own + ["editables", "hatchling", "pip"]))
END
)
mapfile -t requirements <<< "$requirements"
names "${present[@]}" | sort > "$work/present.txt"
names "${present[@]}" "${requirements[@]}" | sort > "$work/all.txt"
comm -13 "$work/present.txt" "$work/all.txt" > "$work/missing.txt"
pip download --quiet --no-deps --dest "$folder" "${options[@]}" -r "$work/missing.txt"
du -sh "$folder"
