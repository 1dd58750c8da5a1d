#!/usr/bin/env bash
# A real Chromium on this host, for the tests in this folder; Playwright's Python package, which drives it, is in the extra
# `dev`. Needs Debian or Ubuntu and root, or sudo that asks nothing. Where a Chromium is found, nothing is done: the tests
# look for it as conftest.py says.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    echo "chromium: $(command -v "$name")"
    exit 0
  fi
done
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "setup.sh: installing Chromium needs root" >&2; exit 1; }
  exec sudo -n "${BASH_SOURCE[0]}"
fi

# Its output matters only where it fails. Without a font there is nothing to see.
apt_install() {
  local said
  said=$(DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core 2>&1 </dev/null) && return
  echo "$said" | tail -n 20 >&2
  return 1
}

echo "installing chromium"
apt_install 2>/dev/null || { apt-get update -qq && apt_install; }
echo "chromium: $(command -v chromium)"
