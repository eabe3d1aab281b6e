"""Versions with a known fault: healthy hosts beside planted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.versions import judge_container_versions, judge_versions
from pytest_gpucluster.inventory.host import HostFacts
from pytest_gpucluster.inventory.machine import Management, Software
from pytest_gpucluster.inventory.nics import Nic
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.judging.finding import HERE
from pytest_gpucluster.measurements.host import HostState
from pytest_gpucluster.thresholds.schema import KnownFault
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pytest_gpucluster.judging.finding import Finding

KNOWN = packaged().versions
REFUSED = NotAvailable("Permission denied")
GOOD = {"driver": "595.71.05", "CUDA": "13.0", "NCCL": "2.30.7"}


def judged(
    versions: dict[str, Any] | None = None,
    *,
    nics: Any = (),
    kernel: str = "6.8.0-1040-nvidia",
    known: Any = KNOWN,
    fabric: str = "sockets",
    **software: Any,
) -> Finding:
    """What is found of a host that is healthy but for this."""
    num_nodes = software.pop("num_nodes", 16)
    state = HostState(
        facts=healthy(HostFacts, kernel=kernel),
        versions={**GOOD, **(versions or {})},
        software=healthy(Software, **software),
        management=healthy(Management),
        variables={},
    )
    return judge_versions(state, nics, known, num_nodes=num_nodes, fabric=fabric)


def adapters(*firmware: Any, driver: str = "mlx5_core") -> list[Nic]:
    """Adapters with this firmware."""
    return [healthy(Nic, device=f"mlx5_{at}", firmware=one, driver=driver) for at, one in enumerate(firmware)]


def test_a_healthy_host() -> None:
    """Nothing is bad, unknown or remarked, and the evidence has every version."""
    found = judged(nics=adapters("28.46.3048", "28.46.3048"), nvswitches={"0000:05:00.0": "96.10.57.00.01"})
    assert (found.judged, found.unknown, found.remark) == (0, {}, None)
    assert found.evidence["firmware of mlx5_0, mlx5_1"] == "28.46.3048"
    assert found.evidence["NVSwitch BIOS of 0000:05:00.0"] == "96.10.57.00.01"


@pytest.mark.parametrize("fabric", ["infiniband", "roce", "efa", "sockets", "none"])
def test_adapters_that_cannot_be_read(fabric: str) -> None:
    """Where the fabric is of adapters, nothing is known of their firmware; elsewhere a host may have none."""
    found = judged(nics=REFUSED, fabric=fabric)
    needs_adapters = fabric in ("infiniband", "roce", "efa")
    assert (found.unknown == {HERE: ("firmware is not available: Permission denied",)}) == needs_adapters
    assert bool(found.unknown) == needs_adapters
    assert judged(nics=REFUSED, fabric=fabric, num_nodes=1).unknown == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"versions": {"driver": "535.183.01"}}, "NVIDIA driver 535.183.01 is older than 535.309.01: CVE-2026-24187"),
        ({"versions": {"driver": "570.86.10"}}, "older than 580.159.03"),
        ({"versions": {"NCCL": "2.27.5"}}, "NCCL 2.27.5 is older than 2.28.7: wrong data"),
        ({"versions": {"NCCL": "22703"}}, "NCCL 22703 is older than 2.28.9: hangs"),
        ({"versions": {"NCCL": "2.29.7"}}, "NVIDIA/nccl, issue 2035"),
        ({"versions": {"NCCL": "2.29.2"}, "machine": "aarch64"}, "a hang on ARM"),
        ({"nics": adapters("28.39.1002")}, "firmware of mlx5_0 28.39.1002 is older than 39.8002: CVE-2025-23351"),
        ({"nics": adapters("28.41.1000")}, "older than 43.8002"),
        ({"kernel": "6.8.0-60-generic"}, "kernel 6.8.0-60-generic is older than 6.8.0-124: CVE-2026-46300"),
        ({"kernel": "5.15.0-1053-azure"}, "kernel 5.15.0-1053-azure is older than 5.15.0-1059: CVE-2024-1086"),
        ({"kernel": "5.15.0-1046-nvidia"}, "kernel 5.15.0-1046-nvidia is older than 5.15.0-1047: CVE-2024-1086"),
        ({"cuda_toolkit": "12.4.1"}, "CUDA toolkit 12.4.1 is older than 13.1"),
        ({"ofed": "MLNX_OFED_LINUX-23.10-1.1.9.0"}, "is older than 23.10-5.1.4.0: CVE-2025-23263"),
        ({"ofed": "24.10-1.1.4.0"}, "OFED 24.10-1.1.4.0 is older than 24.10-3.2.5.0: CVE-2025-23263"),
        ({"ofed": "OFED-internal-24.04-0.7.0"}, "is older than 24.10-3.2.5.0"),
    ],
)
def test_an_old_version(changes: dict[str, Any], says: str) -> None:
    """A remark with the fault, its source and its date: these depend on who uses the cluster."""
    found = judged(**changes)
    assert (found.judged, found.unknown) == (0, {})
    assert says in str(found.remark)


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": "6.8.0-124-generic"},
        {"kernel": "6.14.0-20-generic"},
        {"kernel": "5.15.0-1053-nvidia"},
        {"kernel": "5.14.0-427.el9.x86_64"},
        {"kernel": "6.8.0-137-generic"},
        {"versions": {"NCCL": "2.29.2"}},
        {"nics": adapters("231.1.162.1", driver="bnxt_en")},
        {"nics": NotAvailable("No such file or directory")},
        {"ofed": "none", "cuda_toolkit": "none"},
    ],
)
def test_what_is_not_old(changes: dict[str, Any]) -> None:
    """Nothing is said of other flavours and processors, of adapters that the table does not know, of what is not there."""
    found = judged(**changes)
    assert (found.judged, found.unknown, found.remark) == (0, {}, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"versions": {"driver": "simulated"}}, "NVIDIA driver is 'simulated', which is no version of NVIDIA driver"),
        ({"versions": {"driver": "550.54.15-0ubuntu1"}}, "NVIDIA driver is '550.54.15-0ubuntu1', which is no version"),
        ({"versions": {"driver": REFUSED}}, "NVIDIA driver is not available: Permission denied"),
        ({"versions": {"NCCL": "master"}}, "NCCL is 'master'"),
        ({"nics": adapters(REFUSED)}, "firmware of mlx5_0 is not available: Permission denied"),
        ({"nics": adapters("N/A")}, "firmware of mlx5_0 is 'N/A'"),
        ({"kernel": "rolling"}, "kernel is 'rolling'"),
        ({"kernel": "1:5.15.0-1053-azure"}, "kernel is '1:5.15.0-1053-azure'"),
        ({"ofed": "2:24.10-1.1.4.0"}, "OFED is '2:24.10-1.1.4.0'"),
        ({"cuda_toolkit": REFUSED}, "CUDA toolkit is not available"),
        ({"ofed": "a build of ours"}, "OFED is 'a build of ours'"),
    ],
)
def test_a_version_that_nobody_knows(changes: dict[str, Any], says: str) -> None:
    """It is unknown, with the reason and the next step, and never good."""
    found = judged(**changes)
    assert found.judged is None
    assert says in found.doubts[0]
    assert "versions:" in str(found.unknown_advice)


def test_an_old_version_beside_an_unknown_one() -> None:
    """What is known counts."""
    table = {**KNOWN, "driver": (KnownFault(fixed=["570.86.10"], fault="our contract", source="contract 4.2"),)}
    found = judged({"driver": "550.90.07", "NCCL": "master"}, known=table)
    assert found.bad == {HERE: ("NVIDIA driver 550.90.07 is older than 570.86.10: our contract (contract 4.2, not dated)",)}
    assert len(found.doubts) == 1
    assert found.advice == "update NVIDIA driver to 570.86.10 or newer"
    assert judged({"driver": "570.86.10"}, known=table).judged == 0


def test_a_component_of_which_nothing_is_known() -> None:
    """An NVSwitch that cannot be read is unknown only where a table asks for something."""
    assert judged(nvswitches=REFUSED).judged == 0
    table = {**KNOWN, "nvswitch": (KnownFault(fixed=["96.10.57.00.01"], fault="ours", source="contract"),)}
    assert judged(nvswitches=REFUSED, known=table).judged is None
    assert judged(nvswitches={"0000:05:00.0": "96.10.4F.00.01"}, known=table).count == 1
    assert judged(nvswitches={}, known=table).judged == 0


def containers(**software: Any) -> Finding | None:
    """What is found of what starts containers."""
    return judge_container_versions(healthy(Software, **software), KNOWN)


@pytest.mark.parametrize(
    ("software", "bad"),
    [
        ({"runc": "1.3.3"}, 0),
        ({"runc": "1.4.0", "container_toolkit": "1.19.1"}, 0),
        ({"runc": "1.1.12"}, 1),
        ({"runc": "1.2.0-rc.3"}, 1),
        ({"runc": "1.1.11"}, 2),
        ({"container_toolkit": "1.14.3"}, 4),
        ({"container_toolkit": "1.17.7", "runc": "1.2.8"}, 2),
    ],
)
def test_what_starts_containers(software: dict[str, Any], bad: int) -> None:
    """Each fault that is not mended counts, and names the version, the source and what to do."""
    found = containers(**software)
    assert found is not None
    assert (found.judged, found.unknown, found.remark) == (bad, {}, None)


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("24.0.8", True), ("25.0.1", True), ("23.0.6", True), ("20.10.24+dfsg1", True), ("24.0.9", False), ("28.2.2", False)],
)
def test_a_docker_with_a_known_fault(version: str, *, is_old: bool) -> None:
    """It needs a user who builds a foreign image, so it is a remark; a host with Docker alone is judged."""
    found = containers(docker=version)
    assert found is not None
    assert (found.judged, found.unknown) == (0, {})
    assert ("CVE-2024-23652" in str(found.remark)) is is_old
    assert found.evidence["Docker"] == version


def test_the_words_of_a_fault() -> None:
    """Version, mend, fault, source and date; then the step, to the newest of the mends."""
    found = containers(container_toolkit="1.14.3")
    assert found is not None
    first = "container toolkit 1.14.3 is older than 1.16.2: CVE-2024-0132, an image reaches the host's files"
    assert found.facts[0] == f"{first} (NVIDIA security bulletin 5582, 2024-09-25)"
    assert (found.advice, found.kind) == ("update container toolkit to 1.19.1 or newer", "software")


def test_a_host_without_containers() -> None:
    """It is not judged: nothing is there, or a container hides it."""
    assert containers() is None


@pytest.mark.parametrize("version", [REFUSED, "unknown", "1.1.7-0ubuntu1~22.04.1", "1.1.5+ds1-1+deb12u1"])
def test_a_runtime_of_which_nobody_knows(version: Any) -> None:
    """Not read, no version, or a distribution's build, which may have the mend under its own number."""
    found = containers(runc=version)
    assert found is not None
    assert found.judged is None
    assert found.doubts


def test_a_build_of_a_distribution_that_is_new_enough() -> None:
    """It is good, whatever its suffix."""
    found = containers(runc="1.3.3-0ubuntu1~22.04.2")
    assert found is not None
    assert (found.judged, found.unknown) == (0, {})
