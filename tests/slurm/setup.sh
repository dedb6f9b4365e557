#!/bin/sh
# A Slurm of one node on this machine, for `make test-slurm`. Debian or Ubuntu, as root, no init system needed.
#
# Two partitions on the same node: jobs of `urgent` preempt those of `spare`, which are then queued again.
# No accounting: what is tested must not need it.
set -eu

[ "$(id -u)" = 0 ] || { echo "tests/slurm/setup.sh must be run as root" >&2; exit 2; }
if ! command -v slurmctld > /dev/null || ! command -v munged > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
fi

name=$(hostname -s)
cores=$(nproc)
mkdir -p /etc/slurm /var/spool/slurmctld /var/spool/slurmd /run/munge /var/log/slurm
cat > /etc/slurm/slurm.conf << CONF
ClusterName=muonsw
SlurmctldHost=$name(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
MinJobAge=10
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=$name NodeAddr=127.0.0.1 CPUs=$cores State=UNKNOWN
PartitionName=spare Nodes=$name Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=$name Default=NO MaxTime=60 State=UP PriorityTier=10
CONF

chown -R munge: /run/munge /etc/munge
[ -f /etc/munge/munge.key ] || runuser -u munge -- mungekey
pidof munged > /dev/null || runuser -u munge -- munged
pidof slurmctld > /dev/null || slurmctld -c
pidof slurmd > /dev/null || slurmd -c

for _ in $(seq 60); do
  sinfo --noheader --format=%T 2> /dev/null | grep -q idle && { sinfo; exit 0; }
  sleep 1
done
echo "Slurm does not come up: see /var/log/slurm" >&2
exit 1
