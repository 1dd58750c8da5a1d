# What .ci/run and .ci/matrix share; to be sourced in the root of a clone.

# readme_command NAME: the commands between `<!-- NAME -->` and the end of the code block after it in README.md.
readme_command() {
  awk -v mark="<!-- $1 -->" '$0 == mark {found = 1; next} found && /^```/ {if (open) exit; open = 1; next} open' README.md
}

# python_of VERSION: the path of a Python (3.12). A command on the PATH may be pyenv's, and fail.
python_of() {
  local python
  for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    "$python" -c 'import sys; print(sys.executable)' 2>/dev/null && return
  done
  echo "there is no Python $1, on the PATH or under pyenv; install it (pyenv install $1)" >&2
  return 1
}

# environment VERSION FOLDER [REQUIREMENT...]: quantexp[dev] for a Python in a new environment FOLDER, an absolute path.
#
# The packages of constraints.txt lie in a cache outside of the clone, in one environment for each Python, pyproject.toml
# and constraints.txt. It is made where it does not exist, and removed after 30 days without use. FOLDER itself has
# quantexp of this clone, and each REQUIREMENT (megatron-core==0.17.1), which takes the place of the cached package.
#
#   QUANTEXP_CI_CACHE  the cache (default ~/.cache/quantexp-ci)
environment() (
  set -euo pipefail
  version=$1 folder=$2
  shift 2
  python=$(python_of "$version")
  cache=${QUANTEXP_CI_CACHE:-$HOME/.cache/quantexp-ci}
  packages=$cache/$( ("$python" -VV && cat constraints.txt pyproject.toml) | sha256sum | head -c 16)
  mkdir -p "$packages"
  exec 9>"$packages/lock"
  flock 9
  if [ ! -f "$packages/complete" ]; then
    "$python" -m venv --clear "$packages/venv"
    "$packages/venv/bin/python" -m pip install -q -c constraints.txt -e '.[dev]'
  fi
  touch "$packages/complete"
  exec 9>&-
  find "$cache" -mindepth 2 -maxdepth 2 -name complete -mtime +30 -printf '%h\0' | xargs -0 -r rm -rf

  "$python" -m venv "$folder"
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$packages/venv/${site#"$folder/"}" >"$site/packages.pth"
  "$folder/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
  [ $# -eq 0 ] || "$folder/bin/python" -m pip install -q "$@"
)

# leg FOLDER [MINUTES]: in an environment, the tests of Megatron-LM's loop, none of which begins after MINUTES, README's
# main command, and the default tests of what depends on the release of Megatron-Core.
leg() (
  set -euo pipefail
  export PATH=$1/bin:$PATH
  [ $# -eq 1 ] || export QUANTEXP_SLOW_TESTS_UNTIL=$(($(date +%s) + 60 * $2))
  python -m pytest -n 2 -m slow tests/extras/megatron_lm
  main=$(readme_command main | grep '^quantexp ')
  (cd "$1" && bash -euo pipefail -c "$main")  # not beside the same run of another leg, which it would take as completed
  python -m pytest -n 2 tests/training tests/proof tests/extras/{bisect,evaluate,forensics,megatron_lm}
)
