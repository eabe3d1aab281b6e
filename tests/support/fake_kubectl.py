"""A ``kubectl`` of a test's own: prints documents in the form of the API (core/v1, apps/v1, storage.k8s.io/v1).

They were written by the API's reference and by public examples of NVIDIA's operators; no real cluster was at hand. ``healthy``
is a host with 8 GPUs in a cluster of two; a test plants a fault in a copy.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

BOOT = Path("/proc/sys/kernel/random/boot_id")
APIS = "apps/v1\nkubeflow.org/v2beta1\nkueue.x-k8s.io/v1beta1\nmellanox.com/v1alpha1\nnvidia.com/v1\nresource.k8s.io/v1\nv1"
ALLOWED = {"create pods": "yes"}


def node(name: str, *, gpus: str = "8", all_gpus: str = "8", boot: str | None = None, **conditions: str) -> dict[str, Any]:
    """The record of a host; ``conditions`` differ from those of a healthy one."""
    states = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True", **conditions}
    info = {"bootID": boot or BOOT.read_text().strip(), "kubeletVersion": "v1.33.1", "kernelVersion": "6.8.0-60-generic"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "nvidia.com/gpu.present": "true"}},
        "spec": {"providerID": "made://1"},
        "status": {
            "allocatable": {"cpu": "224", "nvidia.com/gpu": gpus},
            "capacity": {"cpu": "224", "nvidia.com/gpu": all_gpus},
            "conditions": [{"type": kind, "status": state, "reason": "Made"} for kind, state in states.items()],
            "nodeInfo": {**info, "containerRuntimeVersion": "containerd://2.1.1"},
        },
    }


def daemonset(name: str, *, ready: Any = 2, wanted: Any = 2, namespace: str = "gpu-operator", env: Any = ()) -> dict[str, Any]:
    """A DaemonSet of an operator."""
    containers = [{"name": "main", "env": list(env)}]
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"template": {"spec": {"containers": containers}}},
        "status": {"desiredNumberScheduled": wanted, "currentNumberScheduled": wanted, "numberReady": ready},
    }


def listed(*items: Any) -> dict[str, Any]:
    """A list of the API."""
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def healthy(name: str) -> dict[str, Any]:
    """The answer to each question of a cluster in which all is well."""
    by_pod = [{"name": "DCGM_EXPORTER_KUBERNETES", "value": "true"}]
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    named: dict[str, Any] = {"metadata": {"name": "made"}}
    claim = {
        **named,
        "spec": {"storageClassName": "shared-nfs"},
        "status": {"phase": "Bound", "accessModes": ["ReadWriteMany"]},
    }
    address = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
    return {
        "node": node(name),
        "version": {"clientVersion": {"gitVersion": "v1.33.0"}, "serverVersion": {"gitVersion": "v1.33.1"}},
        "api-versions": APIS,
        "daemonsets": listed(
            daemonset("nvidia-device-plugin-daemonset"),
            daemonset("nvidia-dcgm-exporter", env=by_pod),
            daemonset("mofed-ubuntu24.04", namespace="nvidia-network-operator"),
            daemonset("kube-proxy", ready=1, namespace="kube-system"),
            daemonset("node-problem-detector", namespace="kube-system"),
        ),
        "storageclasses": listed(
            {"metadata": {"name": "fast", "annotations": default}, "provisioner": "made"}, {"metadata": {"name": "slow"}}
        ),
        "persistentvolumeclaims": listed(claim),
        "ingressclasses": listed({"metadata": {"name": "nginx"}}),
        "services": listed(
            {**named, "spec": {"type": "LoadBalancer"}, "status": address}, {**named, "spec": {"type": "ClusterIP"}}
        ),
    }


def install(folder: Path, answers: dict[str, Any], *, before: str = "") -> None:
    """Write ``kubectl`` into ``folder``, which belongs on the PATH; ``before`` is shell that runs first.

    An answer is a document, or a text as it is. A question without an answer is forbidden.
    """
    folder.mkdir(exist_ok=True)
    for name, answer in answers.items():
        text = answer if isinstance(answer, str) else json.dumps(answer)
        (folder / f"{name}.answer").write_text(text, encoding="utf-8")
    granted = "\n".join(f'    "{words} "*) echo {said}; exit 0;;' for words, said in ALLOWED.items())
    script = textwrap.dedent("""\
        #!/bin/sh
        cd FOLDER || exit 9
        BEFORE
        name=$1
        [ "$1" = get ] && name=$2
        if [ "$1" = auth ]; then
            shift 2
            case "$* " in
        GRANTED
            *) echo no; exit 1;;
            esac
        fi
        cat "$name.answer" 2>/dev/null && exit 0
        echo "Error from server (Forbidden): $name is forbidden: User \\"made\\" cannot list resource \\"$name\\"" >&2
        exit 1
        """)
    command = folder / "kubectl"
    command.write_text(script.replace("FOLDER", str(folder)).replace("BEFORE", before or ":").replace("GRANTED", granted))
    command.chmod(0o755)
