#!/usr/bin/env bash
# zsh and fish on this host, for the tests of completion (tests/cli/test_completion.py). Needs Debian or Ubuntu and root, or
# sudo that asks nothing. Nothing is installed where both are found.
set -euo pipefail
missing=()
for name in zsh fish; do
  command -v "$name" >/dev/null || missing+=("$name")
done
[ ${#missing[@]} = 0 ] && exit 0
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "setup.sh: installing ${missing[*]} needs root" >&2; exit 1; }
  exec sudo -n "${BASH_SOURCE[0]}"
fi

# The output of apt-get is printed only if it fails.
apt_install() {
  local output
  output=$(DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" 2>&1 </dev/null) && return
  echo "$output" | tail -n 20 >&2
  return 1
}

echo "installing ${missing[*]}"
apt_install 2>/dev/null || { apt-get update -qq && apt_install; }
