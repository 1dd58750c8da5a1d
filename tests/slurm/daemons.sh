# Sourced by setup.sh: starts and stops the daemons of the cluster `$kind`, whose files are below `$dir`. Each daemon has
# its process id in run/NAME.pid and its output in log/NAME.log.

# alive PID: a process that runs; one that ended and that nobody has asked about yet (a zombie) does not.
alive() {
  local state
  state=$(grep '^State:' "/proc/$1/status" 2>/dev/null) && [[ $state != *Z* ]]
}

# running NAME: the process in run/NAME.pid lives and is that daemon, not another one with a used process id.
running() {
  local pid
  pid=$(cat "$dir/run/$1.pid" 2>/dev/null) && [ -n "$pid" ] || return 1
  alive "$pid" && [[ $(cat "/proc/$pid/comm" 2>/dev/null) == "${1%%.*}" ]]
}

# within SECONDS COMMAND...: waits until the command succeeds.
within() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.1
  done
}

failed() {
  echo "setup.sh: $1 of the cluster $kind did not start; the end of $dir/log/$1.log:" >&2
  tail -n 20 "$dir/log/$1.log" >&2
  exit 1
}

# as_host NAME COMMAND...: under that host name, with n1 and n2 known, in namespaces of its own; where the kernel forbids
# that, under this host's name, with n1 and n2 in /etc/hosts.
as_host() {
  if unshare --mount --uts true 2>/dev/null; then
    unshare --mount --uts sh -c 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' sh "$dir/hosts" "$@"
  else
    getent hosts n1 n2 >/dev/null || echo "127.0.0.1 n1 n2" >>/etc/hosts
    "${@:2}"
  fi
}

start_munge() {
  running munged && return
  munged --force --key-file="$dir/munge/key" --seed-file="$dir/munge/seed" --socket="$dir/run/munge.sock" \
    --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --num-threads=4 9>&-
  within 10 munge --socket="$dir/run/munge.sock" --no-input || failed munged
}

# MariaDB listens on a socket file alone; slurmdbd finds that through MYSQL_UNIX_PORT.
start_database() {
  [ -d "$dir/mysql/mysql" ] || mariadb-install-db --no-defaults --datadir="$dir/mysql" --user=root --skip-test-db \
    --auth-root-authentication-method=socket >"$dir/log/mariadb-install.log" 2>&1 9>&-
  if ! running mariadbd; then
    setsid mariadbd --no-defaults --user=root --datadir="$dir/mysql" --socket="$dir/run/mysql.sock" --skip-networking \
      --pid-file="$dir/run/mariadbd.pid" --innodb-buffer-pool-size=64M --innodb-log-file-size=64M \
      --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 </dev/null >"$dir/log/mariadbd.log" 2>&1 9>&- &
    within 30 mariadb-admin --no-defaults --socket="$dir/run/mysql.sock" ping || failed mariadbd
  fi
  running slurmdbd || MYSQL_UNIX_PORT=$dir/run/mysql.sock as_host "$host" slurmdbd 9>&-
  within 30 timeout 5 sacctmgr --noheader list cluster || failed slurmdbd
}

# The accounts and qualities of service that a job may name: research (the default) and normal, urgent. What exists is
# not added again, and sacctmgr calls that an error.
write_accounts() {
  local user
  for user in root ${SUDO_USER:-}; do
    sacctmgr --noheader list association user="$user" account=research | grep -q . && continue
    {
      sacctmgr --immediate add cluster "$kind" || true
      sacctmgr --immediate add qos urgent || true
      sacctmgr --immediate add account research qos=normal,urgent defaultqos=normal || true
      sacctmgr --immediate add user "$user" account=research defaultaccount=research
    } >"$dir/log/accounts.log" 2>&1
  done
}

start_controller() {
  running slurmctld || as_host "$host" slurmctld 9>&-
  within 20 timeout 5 scontrol ping || failed slurmctld
}

start_node() {
  running "slurmd.$1" || as_host "$1" slurmd -N "$1" 9>&-
  within 20 usable "$1" || failed "slurmd.$1"
}

# Whether the node takes jobs; one that SLURM took out of service is put back first.
usable() {
  local state
  state=$(timeout 5 sinfo --noheader --nodes="$1" --partition=lo --format=%T)
  case $state in
    idle | mixed | allocated | completing) return 0 ;;
    *) timeout 5 scontrol update nodename="$1" state=resume; return 1 ;;
  esac
}

start_cluster() {
  running slurmctld || write_configuration
  start_munge
  [ "$kind" = plain ] || { start_database; write_accounts; }
  start_controller
  start_node n1
  start_node n2
}

# stop_daemon NAME [SIGNAL]
stop_daemon() {
  local pid
  if running "$1"; then
    pid=$(cat "$dir/run/$1.pid")
    kill "-${2:-TERM}" "$pid"
    within 15 ended "$pid" || kill -KILL "$pid"
  fi
  rm -f "$dir/run/$1.pid"
}

ended() { ! alive "$1"; }

stop_cluster() {
  [ -d "$dir/run" ] || return 0
  if running slurmctld && running munged; then
    timeout 10 squeue --noheader --format=%A | sort -u | timeout 10 xargs --no-run-if-empty scancel --quiet || true
    within 10 no_jobs || true
  fi
  for daemon in slurmd.n1 slurmd.n2 slurmctld slurmdbd mariadbd munged; do stop_daemon "$daemon"; done
  kill_strays
}

no_jobs() { [ -z "$(timeout 5 squeue --noheader)" ]; }

# What a killed slurmd left behind: step managers and tasks, known by the cluster in their environment.
kill_strays() {
  local process words
  for process in /proc/[0-9]*; do
    words=$({ tr '\0' '\n' <"$process/environ"; } 2>/dev/null) || continue
    grep -qx "SLURM_CONF=$dir/slurm.conf" <<<"$words" || continue
    if grep -q '^SLURM_JOB_ID=' <<<"$words" || [[ $(readlink "$process/exe") == */slurmstepd ]]; then
      kill -KILL "${process#/proc/}" 2>/dev/null || true
    fi
  done
}
