"""scontrol as this host would have it: recorded answers, and every way in which it may fail to give one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pytest_gpucluster.inventory import slurm
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.slurm import (
    SlurmConfig,
    SlurmNode,
    SlurmShare,
    gpus_of,
    is_in,
    parse_block,
    parse_node,
    parse_share,
    parse_states,
)
from tests.support import fake_slurm
from tests.support.fake_slurm import HOST, IDLE, JOB, REASON

OF_2017 = (  # recorded by others, Slurm 17.02
    "NodeName=datamover2 CoresPerSocket=1 CPUAlloc=17 CPUErr=0 CPUTot=24 CPULoad=N/A AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=(null) NodeAddr=datamover2 NodeHostName=datamover2  RealMemory=1 AllocMem=0 FreeMem=N/A "
    "Sockets=24 Boards=1 State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=100 Owner=N/A MCS_label=N/A Partitions=copy  "
    "BootTime=None SlurmdStartTime=None CfgTRES=cpu=24,mem=1M AllocTRES= CapWatts=n/a CurrentWatts=0 LowestJoules=0 "
    "ConsumedJoules=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s "
    "Reason=Not responding [root@2017-06-29T08:00:07]"
)


def test_a_recorded_host() -> None:
    """Slurm 22.05.8, idle, without a GPU."""
    assert parse_node(IDLE) == SlurmNode(
        name="vm", host="vm", states=["IDLE"], reason="", gpus=0, threads_per_core=1, memory_mib=1000, partitions="gpu",
        version="22.05.8",
    )  # fmt: skip


def test_a_recorded_host_that_is_drained() -> None:
    """The reason is the administrator's text as it is."""
    node = parse_node(IDLE.replace("State=IDLE", "State=IDLE+DRAIN") + REASON)
    assert isinstance(node, SlurmNode)
    assert (node.states, node.reason) == (["IDLE", "DRAIN"], "bad GPU 3 [me@x] [root@2026-11-23T12:30:47]")


def test_recorded_partitions() -> None:
    """A state for each name; what is no record says so, and no word of a user passes for a state."""
    text = fake_slurm.PARTITION
    both = f"{text}\n{text.replace('=gpu ', '=all ').replace('State=UP', 'State=DRAIN')}"
    assert slurm.parse_partitions(both) == {"gpu": "UP", "all": "DRAIN"}
    for wrong in ("No partitions in the system", text[: text.index("State=")], f"{text}\nslurm_load_partitions error"):
        assert isinstance(slurm.parse_partitions(wrong), NotAvailable)


def test_an_old_version() -> None:
    """Signs behind the state, and no version."""
    node = parse_node(OF_2017)
    assert isinstance(node, SlurmNode)
    assert node.states == ["DOWN", "NOT_RESPONDING", "DRAIN"]
    assert isinstance(node.version, NotAvailable)


def test_a_reason_is_no_state() -> None:
    """What an administrator writes cannot pass for another field."""
    node = parse_node(f"{IDLE} Reason=was State=DOWN ThreadsPerCore=8 Gres=gpu:9 Partitions=x [root@2026-11-23T12:30:47]")
    assert isinstance(node, SlurmNode)
    assert (node.states, node.gpus, node.threads_per_core, node.partitions) == (["IDLE"], 0, 1, "gpu")


@pytest.mark.parametrize("end", [0, 8, 200, IDLE.index("ThreadsPerCore"), IDLE.index("ThreadsPerCore") + 14])
def test_a_host_cut_off(end: int) -> None:
    """A record without its state is none."""
    assert isinstance(parse_node(IDLE[:end]), NotAvailable)


@pytest.mark.parametrize("text", ["garbage", "\x00\xff\x1b[2J", "State=IDLE ThreadsPerCore=1 ", "{}", "NodeName=vm State= "])
def test_garbage_is_no_host(text: str) -> None:
    """Neither is what has no name, nor JSON."""
    assert isinstance(parse_node(text), NotAvailable)
    assert isinstance(parse_share(text, "vm"), NotAvailable)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE", ["IDLE"]),
        ("MIXED+MAINTENANCE+RESERVED", ["MIXED", "MAINTENANCE", "RESERVED"]),
        ("IDLE*", ["IDLE", "NOT_RESPONDING"]),
        ("idle~", ["IDLE", "POWERED_DOWN"]),
        ("ALLOCATED#+DRAIN", ["ALLOCATED", "POWERING_UP", "DRAIN"]),
        ("MIXED-", ["MIXED", "PLANNED"]),
        ("DOWN$", ["DOWN", "MAINTENANCE"]),
        ("DRAINED^", ["DRAIN", "REBOOT_ISSUED"]),
        ("draining@", ["DRAIN", "REBOOT_REQUESTED"]),
        ("FAILING*", ["FAIL", "NOT_RESPONDING"]),
        ("IDLE%", ["IDLE", "POWERING_DOWN"]),
        ("IDLE!", ["IDLE", "POWER_DOWN"]),
        ("INVAL", ["INVALID_REG"]),
        ("IDLE+NEW_IN_2030", ["IDLE", "NEW_IN_2030"]),
        ("+", []),
    ],
)
def test_states(text: str, states: list[str]) -> None:
    """Words and signs, each by one name."""
    assert parse_states(text) == states


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0), ("", 0), ("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("gpu:h100:4(S:0),gpu:h200:4(S:1),nic:2", 8),
        ("gpu:l4:1(S:0)", 1), ("gpu:h100:2(IDX:0,3)", 2), ("gpu:8(S:0,2),nic:1", 8), ("nic:2", 0), ("gpu:h100:no_consume:4", 4),
        ("gpu_mem:80,gpu:1", 1), ("shard:32,gpu:h100:8", 8),
    ],
)  # fmt: skip
def test_gpus_of_a_gres(gres: str, gpus: int) -> None:
    """All types together, and nothing but GPUs."""
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize("gres", ["gpu", "gpu:h100", "gpu:-1", "gpu:8x", "gpu(IDX:0-3)", "gpu:h100:2(IDX"])
def test_a_gres_without_a_number(gres: str) -> None:
    """Is no number."""
    assert isinstance(gpus_of(gres), NotAvailable)


def test_a_recorded_job() -> None:
    """Slurm 22.05.8: one CPU, 200 MiB."""
    assert parse_share(JOB, "vm") == SlurmShare(cpus=1, memory_mib=200, gpus=0)


def test_a_job_on_several_hosts() -> None:
    """Each has the share of its own group, and a host outside has none."""
    first = fake_slurm.job(hosts="gpu[01-03,07]", cpus="0-63,128-191", memory_mib=1000, gres="gpu:h100:4(IDX:0-3)")
    text = first.replace(" MinCPUsNode", "   Nodes=gpu09 CPU_IDs=0 Mem=5 GRES= MinCPUsNode")
    assert parse_share(text, "gpu02") == parse_share(text, "gpu07") == SlurmShare(cpus=128, memory_mib=1000, gpus=4)
    assert parse_share(text, "gpu09") == SlurmShare(cpus=1, memory_mib=5, gpus=0)
    assert isinstance(parse_share(text, "gpu04"), NotAvailable)


def test_a_name_of_a_job_that_looks_like_a_share() -> None:
    """Two that differ are none: a name may hold anything."""
    text = JOB.replace("JobName=inner.sh", "JobName=a Nodes=vm CPU_IDs=0-99 Mem=1 GRES= B=1")
    share = parse_share(text, "vm")
    assert isinstance(share, NotAvailable)
    assert "several things" in share.why


@pytest.mark.parametrize("end", [0, 20, JOB.index("CPU_IDs"), JOB.index(" GRES= ") + 6, JOB.index("Mem=200") + 5])
def test_a_job_cut_off(end: int) -> None:
    """Half a share is none."""
    assert isinstance(parse_share(JOB[:end], "vm"), NotAvailable)


@pytest.mark.parametrize(
    ("name", "hosts", "expected"),
    [
        ("gpu1", "gpu1", True), ("gpu1", "gpu10", False), ("gpu7", "gpu[1-10]", True), ("gpu07", "gpu[1-10]", False),
        ("gpu07", "gpu[01-10]", True), ("gpu7", "gpu[01-10]", False), ("gpu10", "gpu[01-10]", True),
        ("gpu11", "gpu[8-12]", True), ("a3", "b[1-9],a3", True),
        ("r2n4", "r[1-2]n[3-4]", True), ("r3n4", "r[1-2]n[3-4]", False),
        ("gpu5", "gpu[1-3,5]", True),
        ("gpu-1-2", "gpu-1-[1-3]", True), ("gpu.1", "gpu-1", False), ("gpu100", "gpu[08-100]", True),
        ("gpu3", "gpu[x]", False),
    ],
)  # fmt: skip
def test_lists_of_hosts(name: str, hosts: str, *, expected: bool) -> None:
    """As Slurm writes them; zeros before a number count."""
    assert is_in(name, hosts) is expected


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_a_healthy_answer(on_path: Path) -> None:
    """The host, the job and the controller, each by its own question."""
    fake_slurm.install(on_path, node=fake_slurm.node(gres="gpu:h100:8(S:0-1)"), job=fake_slurm.job(gres="gpu:h100:8(IDX:0-7)"))
    node, share = slurm.read_node(HOST, hostname=f"{HOST}.example.org"), slurm.read_share("2", HOST)
    assert isinstance(node, SlurmNode)
    assert isinstance(share, SlurmShare)
    assert (node.gpus, share.gpus) == (8, 8)
    assert slurm.read_controller() == "Slurmctld(primary) at vm is UP"


def test_how_slurm_is_set_up(on_path: Path) -> None:
    """Each setting, pyxis by srun's own help, and what is absent."""
    fake_slurm.install(on_path, node=IDLE, job=JOB)
    lists = "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\n'"
    script = f"#!/bin/sh\n[ $1 = --mpi=list ] && {{ {lists}; exit; }}\necho '      --container-image=[USER@][REGISTRY#]IMAGE'\n"
    (on_path / "srun").write_text(script)
    (on_path / "srun").chmod(0o755)
    found = slurm.read_config({})
    assert isinstance(found, SlurmConfig)
    assert (found.health_check, found.interval_s, found.pyxis) == ("/usr/sbin/nhc", 300, True)
    assert (found.accounting, found.topology, found.prolog) == (
        "accounting_storage/slurmdbd", "topology/block", "/etc/slurm/prolog.sh",
    )  # fmt: skip
    assert isinstance(found.prolog_most_s, NotAvailable)
    assert (found.mpi, found.packing) == ("none, pmi2, pmix", "select/cons_tres CR_CORE_MEMORY,CR_PACK_NODES")
    (on_path / "srun").write_text("#!/bin/sh\necho 'srun: error: no plugin' >&2; exit 1\n")
    assert "srun lists no way to start MPI" in str(slurm.read_mpi())
    fake_slurm.install(on_path, node=IDLE, job=JOB, before="echo 'permission denied' >&2; exit 1")
    assert isinstance(slurm.read_config({}), NotAvailable)


def test_a_setting_that_is_none() -> None:
    """Empty, as Slurm writes ``(null)``; an unset interval is unknown, never zero."""
    found = slurm.parse_config("HealthCheckProgram      = (null)\nHealthCheckInterval     = 0 sec\nno sign\n")
    assert found == {"HealthCheckProgram": "", "HealthCheckInterval": "0 sec"}


def test_the_time_to_the_step(tmp_path: Path) -> None:
    """From the job's start to the slurmstepd above this process; with a reason where there is none."""
    stats = {"self": "9 (python) S 7", "7": "7 (ba) sh) S 5", "5": "5 (slurmstepd) S 1"}
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000\n")
    for pid, text in stats.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(f"{text} {' '.join('0' * 17)} {50 * os.sysconf('SC_CLK_TCK')} 0\n")
    assert slurm.read_start({"SLURM_JOB_START_TIME": "1042"}, proc=tmp_path) == 8.0
    assert isinstance(slurm.read_start({}, proc=tmp_path), NotAvailable)
    (tmp_path / "5" / "stat").write_text(f"5 (slurmd) S 1 {' '.join('0' * 20)}\n")
    assert isinstance(slurm.read_start({"SLURM_JOB_START_TIME": "1042"}, proc=tmp_path), NotAvailable)
    (tmp_path / "5" / "stat").unlink()
    assert isinstance(slurm.read_start({"SLURM_JOB_START_TIME": "1042"}, proc=tmp_path), NotAvailable)


def test_the_record_of_another_host(on_path: Path) -> None:
    """A variable that came from elsewhere must not judge this host."""
    fake_slurm.install(on_path, node=IDLE.replace("NodeHostName=vm", "NodeHostName=other"), job=JOB)
    node = slurm.read_node("vm", hostname="vm")
    assert isinstance(node, NotAvailable)
    assert node.why == "Slurm's node vm is the host other, and this one is vm"


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("echo 'slurm_load_node error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "connect failure"),
        ("echo 'Node nope not found'; exit 1", "exit code 1: Node nope not found"),
        ("echo 'slurm_load_node error: Access/permission denied' >&2; exit 1", "Access/permission denied"),
        ("kill -9 $$", "exit code -9"),
        ("exit 0", "it printed nothing"),
        ("printf '\\377\\000\\033[2J'; exit 0", "is no record of a node"),
        ("exit 127", "exit code 127"),
    ],
)
def test_a_command_that_fails(on_path: Path, before: str, said: str) -> None:
    """Its own words are the reason."""
    fake_slurm.install(on_path, node=fake_slurm.node(), job=fake_slurm.job(), before=before)
    node = slurm.read_node(HOST, hostname=HOST)
    assert isinstance(node, NotAvailable)
    assert said in node.why


def test_a_command_that_hangs(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the deadline with its children, though one of them keeps the output open."""
    monkeypatch.setattr(slurm, "DEADLINE_S", 0.5)
    fake_slurm.install(on_path, node="", job="", before=f"sleep 1000 & echo $! > {on_path}/child; wait")
    node = slurm.read_node(HOST, hostname=HOST)
    assert isinstance(node, NotAvailable)
    assert "no answer within 0.5 s" in node.why
    child = int((on_path / "child").read_text())
    ends_s = time.monotonic() + 120
    while is_alive(child):
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be read does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_may_not_be_run(on_path: Path) -> None:
    """A file that is no program says so."""
    (on_path / "scontrol").write_text("no program")
    (on_path / "scontrol").chmod(0o755)
    assert "Exec format error" in str(slurm.read_controller())


def test_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.read_controller() == NotAvailable("scontrol is not on the PATH")


TOPOLOGY = """\
BlockName=rack1 BlockIndex=0 Nodes=gpu[01-18] BlockSize=18
BlockName=rack2 BlockIndex=1 Nodes=gpu[19-36],spare1 BlockSize=18
AggregatedBlock=rack[1-2] BlockIndex=2 Nodes=gpu[01-36] BlockSize=36
"""


@pytest.mark.parametrize(
    ("text", "name", "block"),
    [
        (TOPOLOGY, "gpu18", "rack1"),
        (TOPOLOGY, "spare1", "rack2"),
        (TOPOLOGY, "gpu37", None),
        ("SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=gpu[01-18]", "gpu01", None),
        ("No topology information available", "gpu01", None),
    ],
)
def test_the_block_of_a_host(text: str, name: str, block: str | None) -> None:
    """By name, also in Slurm's short form; a switch is no block, and a group of blocks none either."""
    assert parse_block(text, name) == block
