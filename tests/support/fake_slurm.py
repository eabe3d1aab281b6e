"""A ``scontrol`` of a test's own: prints records in the form of a real one.

``IDLE``, ``JOB`` and ``PARTITION`` were recorded with Slurm 22.05.8 of Debian 12 (``scontrol -o show node``,
``-d -o show job``, ``-o show partition``), with one host and no GPU. The GRES in ``node`` and ``job`` follow Slurm's source
(job_info.c, gres.c) and issues of others, up to 25.11 (SlinkyProject/slurm-operator 57 and 101): no real one with GPUs was at
hand.
"""

from __future__ import annotations

import platform
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HOST = platform.node().partition(".")[0]
JOB_ID = "2"
IDLE = (
    "NodeName=vm Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=2.96 AvailableFeatures=abc "
    "ActiveFeatures=abc Gres=(null) NodeAddr=127.0.0.1 NodeHostName=vm Version=22.05.8 OS=Linux 6.18.44-fc-v669 #1 SMP "
    "PREEMPT_DYNAMIC @0  RealMemory=1000 AllocMem=0 FreeMem=20241 Sockets=2 Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions=gpu  BootTime=2026-11-22T18:23:37 SlurmdStartTime=2026-11-23T12:30:41 "
    "LastBusyTime=2026-11-23T12:30:42 CfgTRES=cpu=2,mem=1000M,billing=2 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 "
    "ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
)
REASON = " Reason=bad GPU 3 [me@x] [root@2026-11-23T12:30:47]"
JOB = (
    "JobId=2 JobName=inner.sh UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0 "
    "DerivedExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED "
    "TimeMin=N/A SubmitTime=2026-11-23T12:30:47 EligibleTime=2026-11-23T12:30:47 "
    "AccrueTime=Unknown StartTime=2026-11-23T12:30:47 EndTime=Unknown Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
    "LastSchedEval=2026-11-23T12:30:47 Scheduler=Main Partition=gpu AllocNode:Sid=localhost:24641 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=vm BatchHost=vm NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=1,mem=200M,node=1,billing=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* JOB_GRES=(null)   "
    "Nodes=vm CPU_IDs=0 Mem=200 GRES= MinCPUsNode=1 MinMemoryNode=200M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/tmp/inner.sh WorkDir=/tmp Power= "
)
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO "
    "MaxCPUsPerNode=UNLIMITED Nodes=vm PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=2 TotalNodes=1 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=2,mem=1000M,node=1,billing=2"
)
CONFIG = """\
Configuration data as of 2026-11-23T12:30:47
AccountingStorageType   = accounting_storage/slurmdbd
HealthCheckInterval     = 300 sec
HealthCheckNodeState    = ANY
HealthCheckProgram      = /usr/sbin/nhc
Prolog                  = /etc/slurm/prolog.sh
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY,CR_PACK_NODES
TopologyPlugin          = topology/block
"""
"""Some lines in the form of ``scontrol show config`` of 22.05, by Slurm's source (api/config_info.c)."""
PING = "Slurmctld(primary) at vm is UP"


def node(*, state: str = "IDLE", gres: str = "(null)", host: str = HOST, reason: str = "", memory_mib: int = 1000) -> str:
    """A record of a host."""
    text = IDLE.replace("=vm ", f"={host} ").replace("Gres=(null)", f"Gres={gres}")
    return text.replace("State=IDLE", f"State={state}").replace("RealMemory=1000", f"RealMemory={memory_mib}") + reason


def job(*, cpus: str = "0", memory_mib: int = 200, gres: str = "", hosts: str = HOST) -> str:
    """A record of a job that has the same of each of its hosts."""
    return JOB.replace("Nodes=vm CPU_IDs=0 Mem=200 GRES=", f"Nodes={hosts} CPU_IDs={cpus} Mem={memory_mib} GRES={gres}")


def install(folder: Path, *, node: str, job: str, partition: str = PARTITION, before: str = "") -> Path:
    """Write ``scontrol`` into ``folder``, which belongs on the PATH; ``before`` is shell that runs first."""
    folder.mkdir(exist_ok=True)
    for name, text in (("node", node), ("job", job), ("partition", partition), ("ping", PING), ("config", CONFIG)):
        (folder / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
    script = textwrap.dedent(f"""\
        #!/bin/sh
        cd {folder} || exit 9
        {before or ":"}
        case "$*" in
            "-o show node "*) cat node.txt;;
            "-d -o show job {JOB_ID}") cat job.txt;;
            "-o show partition") cat partition.txt;;
            ping) cat ping.txt;;
            "show config") cat config.txt;;
            *) echo "invalid keyword" >&2; exit 1;;
        esac
        """)
    command = folder / "scontrol"
    command.write_text(script, encoding="utf-8")
    command.chmod(0o755)
    return folder
