#!/usr/bin/env bash
# Real SLURM clusters on this host, for the tests in this folder: `accounting` (slurmdbd, sacct works) and `plain`
# (without). What each has is written at the top of configure.sh. Needs Debian or Ubuntu and root, or sudo that asks
# nothing. Beside the packages it writes only below $QUANTEXP_SLURM_DIR (default /tmp/quantexp-slurm), and where the kernel
# has no namespaces for it, the nodes' names into /etc/hosts.
#
#   setup.sh                       installs what is missing and starts both
#   setup.sh start|stop [KIND]     one kind, or both; starting what runs and stopping what does not are fine
#   setup.sh remove                stops both and deletes what they wrote
#   setup.sh status [KIND]         the daemons, nodes and jobs; exit code 1 if a cluster is down
#   setup.sh env KIND              the line that points SLURM's commands there: eval "$(setup.sh env plain)"
#   setup.sh down-node KIND NODE   takes the node (n1 or n2) out of service, as the controller does when it finds it dead
#   setup.sh kill-node KIND NODE   kills the node's slurmd, as a crash of it does; its tasks run on
#   setup.sh start-node KIND NODE  starts it again and puts the node back into service
set -euo pipefail
unset QUANTEXP_TEST # the daemons outlive the test that starts them (tests/plugins/processes_end.py)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${QUANTEXP_SLURM_DIR:-/tmp/quantexp-slurm}
host=$(hostname -s)
packages=(slurm-wlm slurmdbd munge mariadb-server)
export PATH=$PATH:/usr/sbin
. "$here/configure.sh"
. "$here/daemons.sh"

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

# select_kind KIND: where that cluster lives. Ports follow from the folder, so that clusters in two folders do not meet.
select_kind() {
  case $1 in accounting | plain) kind=$1 ;; *) usage ;; esac
  dir=$root/$kind
  port=$((10000 + $(cksum <<<"$dir" | cut -d' ' -f1) % 4000 * 5))
  export SLURM_CONF=$dir/slurm.conf
}

# select_node KIND NODE
select_node() {
  select_kind "$1"
  case $2 in n1 | n2) node=$2 ;; *) usage ;; esac
}

# each FUNCTION [KIND]: for one kind or for both.
each() {
  for which in ${2:-accounting plain}; do
    select_kind "$which"
    "$1"
  done
}

# The packages that are missing, without starting the services they bring: the clusters have daemons of their own.
install_packages() {
  local missing=() package
  for package in "${packages[@]}"; do
    [[ $(dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null) == "install ok installed" ]] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "installing ${missing[*]}"
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt_install "${missing[@]}" 2>/dev/null || { apt-get update -qq && apt_install "${missing[@]}"; }
}

# Its output matters only where it fails.
apt_install() {
  local said
  said=$(DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" 2>&1 </dev/null) && return
  echo "$said" | tail -n 20 >&2
  return 1
}

show_status() {
  local daemons=(munged slurmctld slurmd.n1 slurmd.n2) daemon up=yes
  [ "$kind" = plain ] || daemons+=(mariadbd slurmdbd)
  for daemon in "${daemons[@]}"; do
    running "$daemon" || { echo "$kind: $daemon is down"; up=no; }
  done
  [ $up = yes ] || { all_up=no; return 0; }
  echo "$kind: up, SLURM_CONF=$SLURM_CONF"
  timeout 10 sinfo --Node --format='%N %P %T %c CPUs %G %f' || all_up=no
  timeout 10 squeue || all_up=no
}

with_lock() {
  mkdir -p "$root"
  { flock --wait 300 9 && "$@"; } 9>"$root/lock"
}

as_root() {
  [ "$(id -u)" = 0 ] && return
  command -v sudo >/dev/null || { echo "setup.sh: starting a cluster needs root" >&2; exit 1; }
  exec sudo -n --preserve-env=QUANTEXP_SLURM_DIR "$here/setup.sh" "$@"
}

case ${1:-all} in
  all) as_root; with_lock install_packages; with_lock each start_cluster; each show_status ;;
  start) as_root "$@"; with_lock each start_cluster "${2:-}" ;;
  stop) as_root "$@"; with_lock each stop_cluster "${2:-}" ;;
  remove) as_root "$@"; with_lock each stop_cluster; rm -rf "$root"/{accounting,plain,lock}; rmdir "$root" ;;
  status) all_up=yes; each show_status "${2:-}"; [ $all_up = yes ] ;;
  env) select_kind "${2:-}"; echo "export SLURM_CONF=$SLURM_CONF" ;;
  down-node) as_root "$@"; select_node "${2:-}" "${3:-}"; scontrol update nodename="$node" state=down reason=test ;;
  kill-node) as_root "$@"; select_node "${2:-}" "${3:-}"; stop_daemon "slurmd.$node" KILL ;;
  start-node) as_root "$@"; select_node "${2:-}" "${3:-}"; start_node "$node" ;;
  *) usage ;;
esac
