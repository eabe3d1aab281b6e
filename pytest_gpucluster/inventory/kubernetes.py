"""What Kubernetes says of this host and of its cluster, by ``kubectl`` with the user's or the Pod's own rights. Reads only.

Its answers are strict JSON of up to 2 MiB, or lines. What they say is data of others: each text is cut to one line. Never run
beside a real cluster: the fields are those of the API (core/v1, apps/v1, storage.k8s.io/v1, networking.k8s.io/v1).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pytest_gpucluster.inventory.program import MOST_BYTES, run_by_name
from pytest_gpucluster.inventory.reading import EVIDENCE, NONE, NotAvailable, all_or_why, apply, matching, read, row
from pytest_gpucluster.inventory.sysfs import PROC, read_text
from pytest_gpucluster.text import one_line

DEADLINE_S = 10.0
"""For one question; all are asked at once."""
LONGEST = 300
"""Characters of a text that are kept. A name of Kubernetes has up to 253."""
OF_SERVER = "--request-timeout=8s"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
KUBELET = Path("/var/lib/kubelet")
FORBIDDEN = "forbidden"
"""How the reason begins where the run has no right to ask."""
UNNAMED = "its name there is not known"
"""How the reason begins where no variable says the name of this host's node, and none has the host's name."""
NAMES = ("GPUCLUSTER_NODE_NAME", "NODE_NAME")
"""Variables in which a Pod says its node's name (``fieldRef: spec.nodeName``); otherwise it is the hostname."""
GPU, MIG, SHARED = "nvidia.com/gpu", "nvidia.com/mig-", ".shared"
REPLICAS, MIG_STRATEGY = "nvidia.com/gpu.replicas", "nvidia.com/mig.strategy"
VIRTUAL = "vcluster.loft.sh/"
"""Of labels and annotations that vCluster gives to its records of nodes."""
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "version": ("version", "-o", "json"),
    "apis": ("api-versions",),
    "daemonsets": ("get", "daemonsets", "--all-namespaces", "-o", "json"),
    "storage": ("get", "storageclasses", "-o", "json"),
    "claims": ("get", "persistentvolumeclaims", "-o", "json"),
    "ingresses": ("get", "ingressclasses", "-o", "json"),
    "services": ("get", "services", "--all-namespaces", "-o", "json"),
}
RIGHTS: Mapping[str, tuple[str, ...]] = {
    "everything": ("*", "*", "--all-namespaces"),
    "start Pods": ("create", "pods"),
    "read all secrets": ("get", "secrets", "--all-namespaces"),
    "reach kubelets (nodes/proxy)": ("get", "nodes", "--subresource=proxy"),
}
"""What ``kubectl auth can-i`` is asked; ``nodes/proxy`` lets a user run commands in any Pod."""
SCHEDULERS = {
    "kueue.x-k8s.io": "Kueue", "scheduling.volcano.sh": "Volcano", "scheduling.run.ai": "KAI", "slinky.slurm.net": "Slinky",
    "scheduling.x-k8s.io": "PodGroups", "jobset.x-k8s.io": "JobSet", "yunikorn.apache.org": "YuniKorn",
}  # fmt: skip
"""Groups of APIs by which jobs of several Pods are queued or start whole."""
OF_GPUS = re.compile(r"nvidia|gpu|dcgm|rdma|mofed|doca|sriov|network-operator|nic-")
"""In the names of DaemonSets that drive GPUs and adapters, as those of NVIDIA's two operators are called."""
EXPORTERS = re.compile(r"dcgm-exporter|node-exporter|gpu-metrics|alloy|telegraf|datadog|otel")
DOCTORS = re.compile(r"node-problem-detector|nvsentinel|node-doctor|health-?monitor|draino|node-healthcheck|gpud")


def why_none(variables: Mapping[str, str], *, account: Path = ACCOUNT, kubelet: Path = KUBELET) -> str | None:
    """Why there is no cluster that could be asked about this host; None where there is one.

    A kubeconfig in a shared home leads to a cluster of which this host may be no part, so a sign of that is asked for.
    """
    if shutil.which("kubectl") is None:
        return "kubectl is not on the PATH"
    in_pod = "KUBERNETES_SERVICE_HOST" in variables
    if not (in_pod or any(map(variables.get, NAMES)) or kubelet.exists()):
        return f"this host is no node of Kubernetes: no Pod, no kubelet ({kubelet}), and no {NAMES[0]}"
    file = Path(variables.get("HOME", "/")) / ".kube" / "config"
    if variables.get("KUBECONFIG") or file.exists() or (in_pod and account.exists()):
        return None
    return "kubectl knows no cluster: no KUBECONFIG, no ~/.kube/config, and no account of a Pod"


def ask(*arguments: str) -> str | NotAvailable:
    """What ``kubectl`` prints; why not: it refuses, is silent, or prints nothing or too much."""
    name = f"kubectl {' '.join(arguments[:2])}"
    ended = run_by_name("kubectl", (*arguments, OF_SERVER), within_s=DEADLINE_S, absent="is not on the PATH")
    if isinstance(ended, NotAvailable):
        return ended
    if ended.exit_code != 0 and not (arguments[0] == "auth" and ended.printed.split()[:1] == ["no"]):
        said = _line(ended.complained.strip() or ended.printed.strip() or "it printed nothing")
        return NotAvailable(f"{FORBIDDEN if '(Forbidden)' in ended.complained else 'no answer'}: {name}: {said}")
    if len(ended.printed.encode()) >= MOST_BYTES:
        return NotAvailable(f"{name}: more than {MOST_BYTES >> 20} MiB, and no more are read")
    return ended.printed.strip() or NotAvailable(f"{name}: it printed nothing")


def parse(text: str) -> dict[str, Any] | NotAvailable:
    """A document of the API."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return NotAvailable(f"kubectl's answer is no JSON: {_line(error)}")
    return found if isinstance(found, dict) else NotAvailable("kubectl's answer is no object of JSON")


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _at(value: Any, *keys: str) -> Any:
    """What lies below these keys; None where a part is missing or of another kind."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _texts(value: Any) -> dict[str, str]:
    """Names and texts of a mapping, each in one line; what is no text is left out."""
    found = value.items() if isinstance(value, dict) else ()
    return {_line(key): _line(one) for key, one in found if isinstance(one, str)}


def _line(text: Any) -> str:
    return one_line(str(text)[:LONGEST])


def _list(value: Any, *keys: str) -> list[Any]:
    """The list below these keys; empty where there is none."""
    found = _at(value, *keys)
    return found if isinstance(found, list) else []


def _items(document: Any) -> list[Any] | NotAvailable:
    found = _at(document, "items")
    is_list = isinstance(found, list) and all(isinstance(_at(one, "metadata", "name"), str) for one in found)
    return found if is_list else NotAvailable("kubectl's answer is no list of the API")


def _apis(text: str) -> list[str] | NotAvailable:
    """Groups with their versions. Each cluster has the core API, ``v1``; a text without it, or with other words, is no list."""
    words = text.split()
    is_list = "v1" in words and all(re.fullmatch(r"([a-z0-9.-]+/)?v\d+((alpha|beta)\d+)?", one, re.ASCII) for one in words)
    return words if is_list else NotAvailable(f"kubectl api-versions: {_line(text)!r} is no list of APIs")


def _name(item: Any) -> str:
    return _line(_at(item, "metadata", "name"))


def _text_at(path: str, document: Any) -> str | NotAvailable:
    found = _at(document, *path.split("."))
    return _line(found) if isinstance(found, str) else NotAvailable(f"no {path}")


# --- The record of this host ---


def _conditions(node: Any) -> dict[str, str] | NotAvailable:
    listed = _list(node, "status", "conditions")
    states = {_line(_at(one, "type")): _line(_at(one, "status")) for one in listed if isinstance(_at(one, "type"), str)}
    return states or NotAvailable("no status.conditions")


def _gpus(which: str, node: Any) -> int | NotAvailable:
    resources = _at(node, "status", which)
    text = resources.get(GPU, "0") if isinstance(resources, dict) else None
    if isinstance(text, str) and re.fullmatch(r"\d{1,6}", text, re.ASCII):
        return int(text)
    return NotAvailable(f"status.{which} has {_line(text)!r} of {GPU}")


def _shared(node: Any) -> str:
    """How one GPU counts as several; ``none`` where each counts as one."""
    labels, resources = _texts(_at(node, "metadata", "labels")), _texts(_at(node, "status", "capacity"))
    if any(name.startswith(MIG) and one != "0" for name, one in resources.items()) or labels.get(MIG_STRATEGY) == "single":
        return "MIG"
    is_shared = labels.get(REPLICAS, "1") not in ("0", "1") or any(name == GPU + SHARED for name in resources)
    return "time slicing or MPS" if is_shared else NONE


def _is_virtual(node: Any) -> bool:
    marks = {**_texts(_at(node, "metadata", "labels")), **_texts(_at(node, "metadata", "annotations"))}
    return any(name.startswith(VIRTUAL) for name in marks)


_NODE = "kubernetes_node"
_OF_NODE = "of `kubernetes_node`"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesNode:
    """A host in the eyes of Kubernetes, by its own record. ``gpus`` are those that Pods may have, of all: ``all_gpus``."""

    name: str | NotAvailable = row(partial(_text_at, "metadata.name"), "simulated", EVIDENCE, _OF_NODE)
    conditions: dict[str, str] | NotAvailable = row(_conditions, {"Ready": "True"}, _NODE)
    cordoned: bool = row(lambda node: _at(node, "spec", "unschedulable") is True, None, EVIDENCE, "as during an acceptance")
    gpus: int | NotAvailable = row(partial(_gpus, "allocatable"), 8, _NODE)
    all_gpus: int | NotAvailable = row(partial(_gpus, "capacity"), 8, _NODE)
    shared: str = row(_shared, NONE, _NODE, "then they are not compared with the bus")
    virtual: bool = row(_is_virtual, None, EVIDENCE, "a record that vCluster made")
    kubelet: str | NotAvailable = row(partial(_text_at, "status.nodeInfo.kubeletVersion"), "v1.33.1", EVIDENCE, _OF_NODE)
    runtime: str | NotAvailable = row(
        partial(_text_at, "status.nodeInfo.containerRuntimeVersion"), "containerd://2.1.1", EVIDENCE, _OF_NODE
    )


def read_node(variables: Mapping[str, str], *, hostname: str, proc: Path = PROC) -> KubernetesNode | NotAvailable:
    """The record of this host. A name may lead to another host, so the record's boot has to be this one's."""
    said = next((variables[one] for one in NAMES if variables.get(one)), None)
    name = hostname.lower() if said is None else said
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,252}", name):
        return NotAvailable(f"{_line(name)!r} is no name of a node")
    boot = read_text(proc / "sys" / "kernel" / "random" / "boot_id")

    def of_host(document: dict[str, Any], own: str) -> KubernetesNode | NotAvailable:
        if _at(document, "kind") != "Node":
            return NotAvailable("kubectl's answer is no record of a node")
        other = _at(document, "status", "nodeInfo", "bootID")
        if other != own:
            return NotAvailable(f"Kubernetes' node {name} is another host: its boot is {_line(other)}, and here {own}")
        return read(KubernetesNode, document)

    found = apply(of_host, apply(parse, ask("get", "node", name, "-o", "json")), boot)
    if isinstance(found, NotAvailable) and "(NotFound)" in found.why:
        why = found.why if said is not None else f"{UNNAMED}: {found.why}"
        return NotAvailable(f"{why}; a Pod says its node's name in {NAMES[0]} (fieldRef: spec.nodeName)")
    return found


# --- The cluster ---


def _daemonsets(items: list[Any]) -> dict[str, Any]:
    """``20 of 20`` Pods ready, by the name of each DaemonSet for GPUs and adapters."""
    found: dict[str, Any] = {}
    for one in items:
        wanted, ready = (_at(one, "status", key) for key in ("desiredNumberScheduled", "numberReady"))
        if OF_GPUS.search(_name(one)) or OF_GPUS.search(_line(_at(one, "metadata", "namespace"))):
            known = type(wanted) is int and type(ready) is int
            found[_name(one)] = f"{ready} of {wanted}" if known else NotAvailable("no counts of its Pods")
    return found


def _named(pattern: re.Pattern[str]) -> Callable[[list[Any]], list[str]]:
    return lambda items: sorted({_name(one) for one in items if pattern.search(_name(one))})


def _by_pod(items: list[Any]) -> bool | NotAvailable:
    """Whether an exporter of DCGM says which Pod has a GPU."""
    found = [one for one in items if "dcgm-exporter" in _name(one)]
    containers = [one for exporter in found for one in _list(exporter, "spec", "template", "spec", "containers")]
    named = {(str(_at(env, "name")), str(_at(env, "value")).lower()) for one in containers for env in _list(one, "env")}
    return ("DCGM_EXPORTER_KUBERNETES", "true") in named if found else NotAvailable("no DaemonSet is called dcgm-exporter")


def _default_classes(items: list[Any]) -> list[str]:
    marked = [one for one in items if _at(one, "metadata", "annotations", DEFAULT_CLASS) == "true"]
    return sorted(_name(one) for one in marked)


def _shared_classes(items: list[Any]) -> list[str]:
    """The classes of this namespace's volumes that are bound and that many nodes may write."""
    bound = [one for one in items if _at(one, "status", "phase") == "Bound"]
    many = [one for one in bound if "ReadWriteMany" in _list(one, "status", "accessModes")]
    return sorted({_line(_at(one, "spec", "storageClassName")) for one in many})


def _balanced(items: list[Any]) -> str:
    """``3 of 4``: services of type LoadBalancer that have an address, of all."""
    found = [one for one in items if _at(one, "spec", "type") == "LoadBalancer"]
    return f"{sum(bool(_at(one, 'status', 'loadBalancer', 'ingress')) for one in found)} of {len(found)}"


def _has(api: str) -> Callable[[list[str]], bool]:
    return lambda apis: api in apis


def _schedulers(apis: list[str]) -> list[str]:
    groups = {one.partition("/")[0] for one in apis}
    return sorted(name for group, name in SCHEDULERS.items() if group in groups)


def _granted(said: dict[str, str | NotAvailable]) -> list[str] | NotAvailable:
    decided: Callable[[str], str | NotAvailable] = matching("(yes|no)\\b", "answer of kubectl auth can-i")
    answers = all_or_why(apply(decided, one) for one in said.values())
    return apply(lambda words: [name for name, one in zip(said, words, strict=True) if one == "yes"], answers)


_CLUSTER = "kubernetes_operators"
_SHOWN = "of `kubernetes_operators`"


def _of(question: str, convert: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda answers: apply(convert, answers[question])


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesCluster:
    """What a cluster of Kubernetes offers. Each value stands alone: a question that is forbidden leaves the others.

    ``daemonsets`` have ``20 of 20`` ready Pods. ``device_classes``: the API of dynamic resources is there. ``remediation`` and
    ``exporters`` are DaemonSets by known names. ``shared_storage`` is of this namespace. ``rights`` are those of the run.
    """

    version: str | NotAvailable = row(_of("version", partial(_text_at, "serverVersion.gitVersion")), None, EVIDENCE, _SHOWN)
    gpu_operator: bool | NotAvailable = row(_of("apis", _has("nvidia.com/v1")), None, _CLUSTER)
    network_operator: bool | NotAvailable = row(_of("apis", _has("mellanox.com/v1alpha1")), None, _CLUSTER)
    daemonsets: dict[str, str | NotAvailable] | NotAvailable = row(_of("daemonsets", _daemonsets), None, _CLUSTER)
    mpi_operator: bool | NotAvailable = row(_of("apis", _has("kubeflow.org/v2beta1")), None, EVIDENCE, _SHOWN)
    schedulers: list[str] | NotAvailable = row(_of("apis", _schedulers), None, EVIDENCE, _SHOWN)
    device_classes: bool | NotAvailable = row(_of("apis", lambda apis: "resource.k8s.io/" in f"{apis}"), None, EVIDENCE, _SHOWN)
    exporters: list[str] | NotAvailable = row(_of("daemonsets", _named(EXPORTERS)), None, EVIDENCE, _SHOWN)
    metrics_by_pod: bool | NotAvailable = row(_of("daemonsets", _by_pod), None, EVIDENCE, _SHOWN)
    remediation: list[str] | NotAvailable = row(_of("daemonsets", _named(DOCTORS)), None, EVIDENCE, _SHOWN)
    default_storage: list[str] | NotAvailable = row(_of("storage", _default_classes), None, EVIDENCE, _SHOWN)
    shared_storage: list[str] | NotAvailable = row(_of("claims", _shared_classes), None, EVIDENCE, _SHOWN)
    ingress_classes: list[str] | NotAvailable = row(_of("ingresses", _named(re.compile(""))), None, EVIDENCE, _SHOWN)
    load_balancers: str | NotAvailable = row(_of("services", _balanced), None, EVIDENCE, _SHOWN)
    rights: list[str] | NotAvailable = row(_of("rights", _granted), None, EVIDENCE, _SHOWN)


def read_cluster() -> KubernetesCluster:
    """The cluster, as this user may see it."""
    with ThreadPoolExecutor(len(QUESTIONS) + len(RIGHTS)) as asked:
        said = {name: asked.submit(ask, *words) for name, words in QUESTIONS.items()}
        rights = {name: asked.submit(ask, "auth", "can-i", *words) for name, words in RIGHTS.items()}
    texts = {name: one.result() for name, one in said.items()}
    answers: dict[str, Any] = {name: apply(_apis if name == "apis" else parse, one) for name, one in texts.items()}
    answers |= {name: apply(_items, answers[name]) for name, words in QUESTIONS.items() if words[0] == "get"}
    return read(KubernetesCluster, {**answers, "rights": {name: one.result() for name, one in rights.items()}})


def read_kubernetes(hostname: str) -> dict[str, Any]:
    """This host and its cluster by name, for people who look at it; why not, where no cluster can be asked."""
    why = why_none(os.environ)
    if why is not None:
        return {"node": NotAvailable(why), "cluster": NotAvailable(why)}
    return {"node": read_node(os.environ, hostname=hostname), "cluster": read_cluster()}
