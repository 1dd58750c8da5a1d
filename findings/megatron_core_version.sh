#!/usr/bin/env bash
# megatron-core 0.19.2: __version__ ends with the commit of whatever git repository the environment lies in.
#
# Guess: "0.19.2", as pip says.
# Seen: in an environment inside of a project's repository (README files often say `python3 -m venv .venv`) it is 0.19.2+
#       and the project's own commit, from `git rev-parse` in the folder of the package; outside of one it is 0.19.2.
# Why it matters: a record of a run names a build of Megatron-Core that does not exist, and another one after each commit
#       of one's own code. Use `importlib.metadata.version`, or set NO_VCS_VERSION=1.
set -euo pipefail
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT
git init -q "$project"
git -C "$project" -c user.name=a -c user.email=a@example.org commit -q --allow-empty -m "a project"
python3 -m venv "$project/.venv"
"$project/.venv/bin/pip" install -q --no-deps --target "$project/packages" --ignore-requires-python --only-binary :all: \
  --python-version 3.12 'megatron-core==0.19.2'
version() {
  "$project/.venv/bin/python" -c 'import runpy, sys; print(runpy.run_path(sys.argv[1])["__version__"])' "$1"
}
file=$project/packages/megatron/core/package_info.py
inside=$(version "$file")
rm -rf "$project/.git"
outside=$(version "$file")
echo "in a repository: $inside; outside: $outside"
[[ $inside =~ ^0\.19\.2\+[0-9a-f]+$ ]]
[[ $outside == 0.19.2 ]]
