# Sourced by setup.sh: writes the configuration of the cluster `$kind` below `$dir`. Both clusters have the nodes n1 and
# n2 on this host, each with 16 CPUs and 4 GPUs that exist for the scheduler alone, and the partitions lo, hi and short.
# They differ where real sites differ:
#
#                 accounting                        plain
#   sacct         works (slurmdbd, MariaDB)         fails
#   account, qos  must exist                        ignored
#   a request     refused by sbatch                 accepted, waits for ever
#     over a partition's limits
#   ended jobs    known to scontrol for 5 minutes   forgotten after 20 to 40 seconds

write_configuration() {
  mkdir -p "$dir"/{dev,log,munge,run,spool.n1,spool.n2,state}
  chmod 700 "$dir/munge"
  [ -s "$dir/munge/key" ] || { (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key.new"); mv "$dir/munge/key.new" "$dir/munge/key"; }
  echo "127.0.0.1 localhost $host n1 n2" >"$dir/hosts"
  echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf"
  write_gpus
  { slurm_conf; "slurm_conf_$kind"; } >"$dir/slurm.conf"
  [ "$kind" = plain ] || { (umask 077 && slurmdbd_conf >"$dir/slurmdbd.conf"); }
}

# SLURM drops a GPU without a device file, so each gets one: another name for /dev/null.
write_gpus() {
  for gpu in 0 1 2 3; do
    [ -e "$dir/dev/nvidia$gpu" ] || mknod "$dir/dev/nvidia$gpu" c 1 3
  done
  echo "NodeName=n[1-2] Name=gpu File=$dir/dev/nvidia[0-3]" >"$dir/gres.conf"
}

slurm_conf() {
  cat <<CONF
ClusterName=$kind
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log

# Nothing that needs cgroups, mail or hardware.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
MailProg=/bin/true
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=512

# Impatient, so that tests need not wait.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
KillWait=30
SlurmdTimeout=10
SlurmctldTimeout=10
BatchStartTimeout=10
ReturnToService=1
TCPTimeout=2

JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal

NodeName=DEFAULT CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:4
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=$((port + 1))
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=$((port + 2)) Feature=big
PartitionName=lo Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=hi Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL PriorityTier=1 PreemptMode=OFF MaxTime=5 MaxNodes=1
CONF
}

slurm_conf_accounting() {
  cat <<CONF
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 3))
AccountingStoragePass=$dir/run/munge.sock
AccountingStorageEnforce=associations,qos
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
CONF
}

slurm_conf_plain() {
  cat <<CONF
EnforcePartLimits=NO
AccountingStorageType=accounting_storage/none
MinJobAge=20
CONF
}

slurmdbd_conf() {
  cat <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((port + 3))
SlurmUser=root
PidFile=$dir/run/slurmdbd.pid
LogFile=$dir/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
CONF
}
