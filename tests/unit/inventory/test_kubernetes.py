"""What Kubernetes says of a host and of its cluster, by a made ``kubectl``; each fault planted beside its healthy twin."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster import health
from pytest_gpucluster.commands.main import main
from pytest_gpucluster.inventory import kubernetes
from pytest_gpucluster.inventory.kubernetes import KubernetesNode, read_cluster, read_node, why_none
from pytest_gpucluster.inventory.program import MOST_BYTES
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.measurements import host
from tests.support import fake_kubectl
from tests.support.fake_kubectl import daemonset, healthy, listed, node

if TYPE_CHECKING:
    from pathlib import Path

NAME = "gpu-1"
MINE = {"NODE_NAME": NAME}


@pytest.fixture(autouse=True)
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH, and a kubeconfig."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", "made")
    monkeypatch.setenv("NODE_NAME", NAME)
    return tmp_path


def judged(folder: Path, record: Any, *, on_bus: int | NotAvailable = 8) -> Any:
    """What is found of a host with this record."""
    fake_kubectl.install(folder, {**healthy(NAME), "node": record})
    return health.judge_kubernetes(read_node(MINE, hostname="pod-0"), on_bus)


def test_a_healthy_host(on_path: Path) -> None:
    """Each reading, and nothing wrong; it is found by the variable, not by the Pod's hostname."""
    found = judged(on_path, node(NAME))
    assert (found.facts, found.doubts, found.remark) == ((), (), None)
    read = read_node(MINE, hostname="pod-0")
    assert isinstance(read, KubernetesNode)
    assert (read.name, read.gpus, read.all_gpus, read.shared) == (NAME, 8, 8, "none")
    assert (read.cordoned, read.virtual, read.kubelet, read.runtime) == (False, False, "v1.33.1", "containerd://2.1.1")


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"Ready": "False"}, "Ready is False: Kubernetes gives it no Pods"),
        ({"Ready": "Unknown"}, "Ready is Unknown"),
        ({"MemoryPressure": "True"}, "MemoryPressure is True: it is short of memory"),
        ({"DiskPressure": "True"}, "DiskPressure is True"),
        ({"PIDPressure": "True"}, "PIDPressure is True"),
        ({"NetworkUnavailable": "True"}, "its network is not set up"),
        ({"KernelDeadlock": "True"}, "hangs in the kernel"),
        ({"ReadonlyFilesystem": "True"}, "became read-only"),
        ({"gpus": "7"}, "Pods get 7 of 8 GPUs"),
        ({"gpus": "0"}, "Pods get 0 of 8 GPUs"),
        ({"gpus": "7", "all_gpus": "7"}, "Kubernetes counts 7 GPUs, and 8 are on the PCI bus"),
    ],
)
def test_a_planted_fault(planted: dict[str, Any], words: str, on_path: Path) -> None:
    """One fact, which says what is wrong."""
    (fact,) = judged(on_path, node(NAME, **planted)).facts
    assert words in fact


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (node(NAME, DiskPressure="Unknown"), "DiskPressure is Unknown"),
        (node(NAME, gpus="many"), "GPUs for Pods: not available: status.allocatable has 'many'"),
        (node(NAME, all_gpus="-8"), "GPUs of the host: not available"),
        ({**node(NAME), "status": {**node(NAME)["status"], "conditions": 7}}, "its conditions are not available"),
        ({**node(NAME), "status": {**node(NAME)["status"], "capacity": "8"}}, "GPUs of the host: not available"),
        (node(NAME, boot="another"), "is another host: its boot is another"),
        ({**node(NAME), "kind": "Pod"}, "no record of a node"),
        ("[1, 2]", "no object of JSON"),
        ("{", "no JSON"),
        ('{"kind": NaN}', "no JSON"),
        pytest.param("[" * 100_000, "no JSON", id="deep"),
        pytest.param("x" * (MOST_BYTES + 1), "more than 2 MiB", id="long"),  # pytest 8 puts the id into the environment
        ("", "it printed nothing"),
    ],
)
def test_what_cannot_be_known(record: Any, words: str, on_path: Path) -> None:
    """Unknown with its reason, and no fault."""
    found = judged(on_path, record)
    assert found.facts == ()
    assert any(words in doubt for doubt in found.doubts), found.doubts


def test_no_count_of_the_bus(on_path: Path) -> None:
    """Where sysfs does not show the GPUs, their number is unknown."""
    assert judged(on_path, node(NAME), on_bus=NotAvailable("hidden")).doubts == ("GPUs on the PCI bus: not available: hidden",)


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ({"nvidia.com/mig.strategy": "single"}, {"nvidia.com/gpu": "4"}),
        ({}, {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.10gb": "7"}),
        ({"nvidia.com/gpu.replicas": "4"}, {"nvidia.com/gpu": "4"}),
        ({}, {"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "16"}),
    ],
)
def test_shared_gpus_are_not_compared(labels: dict[str, str], capacity: dict[str, str], on_path: Path) -> None:
    """With MIG or time slicing a resource is no GPU."""
    record = node(NAME)
    record["metadata"]["labels"] |= labels
    record["status"] |= {"capacity": capacity, "allocatable": capacity}
    assert judged(on_path, record).facts == ()


def test_what_is_a_remark(on_path: Path) -> None:
    """A condition of others, and GPUs that Kubernetes does not count; a cordoned host is only shown."""
    record = node(NAME, GpuNvlinkDown="True", gpus="0", all_gpus="0")
    record["spec"]["unschedulable"] = True
    record["metadata"]["annotations"] = {"vcluster.loft.sh/object-name": NAME}
    found = judged(on_path, record)
    assert found.facts == ()
    assert found.doubts == ()
    assert "the condition GpuNvlinkDown is True" in str(found.remark)
    assert "counts no GPU of this host, and 8 GPUs on the PCI bus" in str(found.remark)
    assert (found.evidence["cordoned"], found.evidence["virtual"]) == ("yes", "yes")


def test_foreign_text_stays_in_its_line(on_path: Path) -> None:
    """A condition's name moves no cursor, and is cut."""
    found = judged(on_path, node(NAME, **{"\x1b[2J\nverdict ACCEPTED" + "x" * 100_000: "True"}))
    assert "\x1b" not in str(found.remark)
    assert "\n" not in str(found.remark)
    assert len(str(found.remark)) < 10_000


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("echo 'Error from server (Forbidden): nodes is forbidden' >&2; exit 1", "forbidden: kubectl get node"),
        ("echo 'Error from server (NotFound): nodes \"gpu-1\" not found' >&2; exit 1", "GPUCLUSTER_NODE_NAME"),
        ("echo 'The connection to the server was refused' >&2; exit 1", "no answer: kubectl get node"),
        ("exit 7", "it printed nothing"),
        ("kill -9 $$", "no answer: kubectl get node"),
        ("sleep 600", "no answer within 0.5 s"),
    ],
)
def test_a_cluster_that_refuses(before: str, words: str, on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its reason, within the time of one question."""
    monkeypatch.setattr(kubernetes, "DEADLINE_S", 0.5 if "sleep" in before else 60.0)
    fake_kubectl.install(on_path, healthy(NAME), before=before)
    begun_s = time.monotonic()
    found = read_node(MINE, hostname="pod-0")
    assert isinstance(found, NotAvailable)
    assert words in found.why
    assert time.monotonic() - begun_s < 60
    assert health.judge_kubernetes(found, 8).doubts
    assert (health.why_not_asked(None, found) is not None) is ("Forbidden" in before)


@pytest.mark.parametrize(("variables", "is_judged"), [({}, False), ({"NODE_NAME": ""}, False), (MINE, True)])
def test_a_name_that_nobody_said(variables: dict[str, str], *, is_judged: bool, on_path: Path) -> None:
    """A Pod has a name of its own: that no node is called so says nothing of the host. A name that was said has to be there."""
    fake_kubectl.install(on_path, healthy(NAME), before="echo 'Error from server (NotFound): not found' >&2; exit 1")
    found = read_node(variables, hostname="pod-0")
    assert isinstance(found, NotAvailable)
    assert "GPUCLUSTER_NODE_NAME" in found.why
    assert (health.why_not_asked(None, found) is None) is is_judged


@pytest.mark.parametrize("name", ["--kubeconfig=/x", "a b", "../x", "x" * 300])
def test_a_name_that_is_no_node(name: str) -> None:
    """It is no option of kubectl, and is not asked for."""
    found = read_node({"NODE_NAME": name}, hostname="pod-0")
    assert isinstance(found, NotAvailable)
    assert "is no name of a node" in found.why


def test_no_cluster(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked where there is no program, no kubeconfig and no account; each of the three ways in counts."""
    home, account = on_path / "home", on_path / "token"
    found = {"HOME": str(home), "NODE_NAME": NAME}
    fake_kubectl.install(on_path, healthy(NAME))
    assert "knows no cluster" in str(why_none(found, account=account))
    assert why_none({**found, "KUBECONFIG": "x"}, account=account) is None
    in_pod = {**found, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert "knows no cluster" in str(why_none(in_pod, account=account))
    account.write_text("made")
    assert why_none(in_pod, account=account) is None
    (home / ".kube").mkdir(parents=True)
    (home / ".kube" / "config").write_text("made")
    assert why_none(found, account=on_path / "none") is None
    elsewhere = {"HOME": str(home), "KUBECONFIG": "x"}
    assert "this host is no node of Kubernetes" in str(why_none(elsewhere, kubelet=on_path / "none"))
    assert why_none(elsewhere, kubelet=home) is None
    monkeypatch.setenv("PATH", str(on_path / "empty"))
    assert why_none({**found, "KUBECONFIG": "x"}) == "kubectl is not on the PATH"
    assert host.kubernetes_node() == host.kubernetes_cluster() == host.KubernetesState(why_none="kubectl is not on the PATH")


def test_a_healthy_cluster(on_path: Path) -> None:
    """All that it offers, and nothing wrong; a DaemonSet of others counts for nothing."""
    fake_kubectl.install(on_path, healthy(NAME))
    state = host.kubernetes_cluster()
    assert state.cluster is not None
    found = health.judge_operators(state.cluster)
    assert (found.facts, found.doubts) == ((), ())
    assert found.evidence == {
        "version": "v1.33.1",
        "gpu operator": "yes",
        "network operator": "yes",
        "daemonsets": "nvidia-device-plugin-daemonset 2 of 2, nvidia-dcgm-exporter 2 of 2, mofed-ubuntu24.04 2 of 2",
        "mpi operator": "yes",
        "schedulers": "Kueue",
        "device classes": "yes",
        "exporters": "nvidia-dcgm-exporter",
        "metrics by pod": "yes",
        "remediation": "node-problem-detector",
        "default storage": "fast",
        "shared storage": "shared-nfs",
        "ingress classes": "nginx",
        "load balancers": "1 of 1",
        "rights": "start Pods",
    }


@pytest.mark.parametrize(
    ("planted", "facts", "doubts"),
    [
        (daemonset("nvidia-device-plugin-daemonset", ready=1), ["the DaemonSet nvidia-device-plugin-daemonset has 1 of 2"], []),
        (daemonset("anything", ready=0, namespace="nvidia-network-operator"), ["anything has 0 of 2 Pods ready"], []),
        (daemonset("nvidia-driver-daemonset", ready="many"), [], ["nvidia-driver-daemonset: not available: no counts"]),
        (daemonset("kube-proxy", ready=0, namespace="kube-system"), [], []),
        (daemonset("nvidia-mig-manager", ready=0, wanted=0), [], []),
        ({"metadata": 7}, [], ["the DaemonSets: not available: kubectl's answer is no list"]),
        ("no object", [], ["the DaemonSets: not available: kubectl's answer is no list"]),
    ],
)
def test_a_planted_daemonset(planted: Any, facts: list[str], doubts: list[str], on_path: Path) -> None:
    """Fewer Pods than are due, of GPUs and adapters; what is not due counts for nothing."""
    fake_kubectl.install(on_path, {**healthy(NAME), "daemonsets": listed(planted)})
    found = health.judge_operators(read_cluster())
    assert [want in have for want, have in zip(facts, found.facts, strict=True)] == [True] * len(facts)
    assert [want in have for want, have in zip(doubts, found.doubts, strict=True)] == [True] * len(doubts)


def test_a_bare_cluster(on_path: Path) -> None:
    """What is not there is none, which is no fault."""
    empty = {name: listed() for name, answer in healthy(NAME).items() if "items" in answer}
    fake_kubectl.install(on_path, {**healthy(NAME), **empty, "api-versions": "apps/v1\nv1"})
    found = health.judge_operators(read_cluster())
    assert (found.facts, found.doubts) == ((), ())
    shown = {name: found.evidence[name] for name in ("gpu operator", "schedulers", "default storage", "load balancers")}
    assert shown == {"gpu operator": "no", "schedulers": "none", "default storage": "none", "load balancers": "0 of 0"}
    assert "no DaemonSet is called dcgm-exporter" in found.evidence["metrics by pod"]


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ("version", "version"), ("api-versions", "gpu operator"), ("daemonsets", "daemonsets"),
        ("storageclasses", "default storage"), ("persistentvolumeclaims", "shared storage"),
        ("ingressclasses", "ingress classes"), ("services", "load balancers"),
    ],
)  # fmt: skip
def test_a_question_that_is_forbidden(question: str, field: str, on_path: Path) -> None:
    """It leaves the others. It is an error only where the criterion needs it."""
    answers = healthy(NAME)
    del answers[question]
    fake_kubectl.install(on_path, answers)
    found = health.judge_operators(read_cluster())
    assert "not available: forbidden" in found.evidence[field]
    assert bool(found.doubts) is (question in ("api-versions", "daemonsets"))
    assert sum("not available" in words for words in found.evidence.values()) < 7


NO_LISTS = ("{}", '{"items": 7}', "[]", '{"items": [null]}', '{"items": [{"metadata": {"name": 7}}]}', "null", "404", "<html>")
NO_APIS = (
    "Welcome to nginx!",
    "v2",
    "apps/v1\nnvidia.com/v1",
    "v1 <html>",
    '{"kind": "APIGroupList"}',
    "nvidia.com/v1\nv1\n\ufffd",
)


@pytest.mark.parametrize("answer", [*NO_LISTS, *NO_APIS])
def test_garbage_is_no_bare_cluster(answer: str, on_path: Path) -> None:
    """Of no question: what was not understood is unknown, and never that there is nothing."""
    fake_kubectl.install(on_path, dict.fromkeys(healthy(NAME), answer), before=f"[ $1 = auth ] && echo '{answer}' && exit 0")
    found = health.judge_operators(read_cluster())
    assert (found.facts, len(found.doubts)) == ((), 3)
    assert {name for name, words in found.evidence.items() if "not available" not in words} == set()


@pytest.mark.parametrize("said", ["no", "no - no RBAC policy matched"])
def test_a_right_that_is_not_granted(said: str, on_path: Path) -> None:
    """Some servers say why."""
    fake_kubectl.install(on_path, healthy(NAME), before=f"[ $1 = auth ] && echo '{said}' && exit 1")
    assert read_cluster().rights == []


def test_info(on_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The view has the host and its cluster; its JSON too; without a cluster one line says why."""
    fake_kubectl.install(on_path, healthy(NAME))
    assert main(["info", "kubernetes"]) == 0
    shown = capsys.readouterr().out
    assert "Ready True" in shown
    assert "nvidia-device-plugin-daemonset 2 of 2" in shown
    main(["info", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["kubernetes"]["node"]["conditions"]["Ready"] == "True"
    assert found["kubernetes"]["cluster"]["rights"] == ["start Pods"]
    assert "docker" in found["offered"]
    monkeypatch.setenv("PATH", str(on_path / "empty"))
    assert main(["info", "kubernetes"]) == 0
    assert "kubectl is not on the PATH" in capsys.readouterr().out
