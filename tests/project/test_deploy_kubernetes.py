"""The files below deploy/kubernetes: their schemas, what our own launcher reads of them, and what a site edits. No cluster."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_gpucluster.commands import healthcheck, launch, main
from pytest_gpucluster.commands.report import read_options
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
FILES = sorted(KUBERNETES.rglob("*.yaml"))
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
KINDS = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainingRuntime"}
BEGIN, END = "# --- a site edits these ---", "# --------------------------"
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "GPUCLUSTER_SECRET", "TORCHELASTIC_RUN_ID")


def documents(path: Path) -> list[dict[str, Any]]:
    """All objects of a file."""
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects of ``job``, ``jobset`` or ``trainjob``, by kind."""
    return {one["kind"]: one for one in documents(KUBERNETES / name / f"{name}.yaml")}


def job_spec(name: str, found: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The specification of the Job in it."""
    spec: dict[str, Any] = (found or objects(name))[KINDS[name]]["spec"]
    spec = spec["template"]["spec"] if name == "trainjob" else spec
    return spec if name == "job" else dict(spec["replicatedJobs"][0]["template"]["spec"])


def pod_of(name: str) -> dict[str, Any]:
    """The Pod's specification, as it differs between the three on purpose taken out."""
    pod = copy.deepcopy(job_spec(name)["template"]["spec"])
    pod.pop("subdomain", None)
    container = pod["containers"][0]
    container.pop("resources", None)
    container["name"] = "-"
    container["env"] = [one for one in container["env"] if one["name"] != "GPUCLUSTER_SERVICE"]
    return dict(pod)


def built(path: Path) -> dict[str, dict[str, Any]]:
    """What kustomize makes of a folder, by kind."""
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(program[0]) is None:
        pytest.skip("neither kustomize nor kubectl is installed")
    made = subprocess.run([*program, path], capture_output=True, text=True, check=False, timeout=60)
    if "unknown command" in made.stderr or "accumulating components" in made.stderr:
        pytest.skip("this kubectl is too old for kustomize's replacements")
    assert made.returncode == 0, made.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(made.stdout)}


def copied(folder: Path, **settings: str) -> Path:
    """A site's copy, with other numbers at the heads."""
    shutil.copytree(KUBERNETES, folder / "site")
    for file in (folder / "site").rglob("*.yaml"):
        lines = file.read_text(encoding="utf-8").splitlines()
        for at, line in enumerate(lines):
            name = line.strip().partition(":")[0]
            if name in settings and line.startswith("  "):
                lines[at] = f'  {name}: "{settings[name]}"'
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "site"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_every_file_says_what_it_is(path: Path) -> None:
    """Its first line: that no cluster ran it. A head that a site edits, where there is something to edit."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# Never run on a cluster.")
    if path.name not in ("computedomain.yaml", "gpus.yaml"):
        assert lines.index(BEGIN) < lines.index(END)
        assert lines.index(BEGIN) == 1


@pytest.mark.parametrize("name", KINDS)
def test_the_sizes_of_the_documents(name: str) -> None:
    """8 GPUs, 64 CPUs, 1,400 GiB a node; a deadline; no second try; shared memory; and the results on a volume."""
    found = objects(name)
    limits = (
        found["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]["limits"]
        if name == "trainjob"
        else job_spec(name)["template"]["spec"]["containers"][0]["resources"]["limits"]
    )
    assert limits == {"cpu": "64", "memory": "1400Gi", "nvidia.com/gpu": 8}
    timed = found["TrainJob"]["spec"] if name == "trainjob" else job_spec(name)
    assert timed["activeDeadlineSeconds"] > 0
    assert job_spec(name)["backoffLimit"] == 0
    pod = pod_of(name)
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"  # noqa: S108 -- not ours
    assert "persistentVolumeClaim" in mounts["/results"]


@pytest.mark.parametrize("name", KINDS)
def test_the_least_privilege(name: str) -> None:
    """IPC_LOCK, and nothing else: no host network, no host path, no service account, no capability."""
    pod = pod_of(name)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    assert not any("hostPath" in one for one in pod["volumes"])
    security = pod["containers"][0]["securityContext"]
    assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


def test_one_pod_in_three_files() -> None:
    """No copy has a change that the others lack."""
    assert pod_of("job") == pod_of("jobset") == pod_of("trainjob")
    assert objects("job")["ConfigMap"] == objects("jobset")["ConfigMap"] == objects("trainjob")["ConfigMap"]


def variables(name: str, *, index: int) -> dict[str, str]:
    """What a container of the Pod with this index has in its environment."""
    found, container = objects(name), job_spec(name)["template"]["spec"]["containers"][0]
    known = {**found["ConfigMap"]["data"], "JOB_COMPLETION_INDEX": str(index)}
    known |= {one["name"]: one.get("value", f"from-{one['name']}") for one in container["env"]}
    if name == "trainjob":
        trainer = found["TrainJob"]["spec"]["trainer"]
        known |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        known |= {"PET_MASTER_ADDR": "gpucluster-node-0-0.gpucluster", "PET_MASTER_PORT": "29400"}
    return known


@pytest.mark.parametrize(
    ("name", "hostname", "first"),
    [
        ("job", "gpucluster-1", "gpucluster-0.gpucluster"),
        ("jobset", "gpucluster-nodes-0-1", "gpucluster-nodes-0-0.gpucluster"),
        ("trainjob", "gpucluster-node-0-1", "gpucluster-node-0-0.gpucluster"),
    ],
)
def test_the_launcher_understands_it(name: str, hostname: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of each is understood by our own parsers, and names nodes, GPUs and node 0."""
    for variable in SLURM:
        monkeypatch.delenv(variable, raising=False)
    known = variables(name, index=1)
    for variable, value in known.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    container = job_spec(name)["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    for variable, value in known.items():
        words = [word.replace(f"$({variable})", value) for word in words]
    assert "$(" not in "".join(words)
    job = launch.read_job(main._parse(words[1:]))
    assert (words[0], job.num_nodes, job.num_local, job.node_rank, job.master_addr) == ("gpucluster", 2, 8, 1, first)
    assert job.start == known["GPUCLUSTER_START"]
    settings, _ = read_options(job.pytest_arguments)
    assert (settings.gate, settings.level, str(settings.termination)) == (True, "standard", "/dev/termination-log")
    assert str(settings.results_dir) == f"/results/{known['GPUCLUSTER_START']}"


@pytest.mark.parametrize("name", KINDS)
def test_its_numbers_agree(name: str) -> None:
    """Those at the head are those below, so that "apply -f" works as it is."""
    found = objects(name)
    data, spec = found["ConfigMap"]["data"], job_spec(name)
    if name == "trainjob":
        trainer = found["TrainJob"]["spec"]["trainer"]
        nodes, gpus, image = (trainer["numNodes"],), trainer["numProcPerNode"], trainer["image"]
    else:
        container = spec["template"]["spec"]["containers"][0]
        nodes, image = (spec["completions"], spec["parallelism"]), container["image"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert spec["completionMode"] == "Indexed"
    assert {str(number) for number in nodes} == {data["GPUCLUSTER_NODES"]}
    assert (str(gpus), image) == (data["GPUCLUSTER_GPUS"], data["IMAGE"])


def test_the_service_finds_the_pods() -> None:
    """Headless, before they are ready, by the labels of the Pods, under the name of their subdomain."""
    service, spec = objects("job")["Service"], job_spec("job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]


# Schemas.


def complaints(document: dict[str, Any], version: str) -> Iterator[str]:
    """What Kubernetes' schema, or the model of a custom kind, has against a document."""
    if document["kind"] in MODELS:
        models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
        try:
            read = getattr(models, MODELS[document["kind"]]).from_dict(copy.deepcopy(document))
            yield from lost(document, json.loads(read.to_json()))
        except ValueError as error:  # pydantic's own
            yield str(error)
        return
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    try:
        validate.validate(document, version, strict=True)
    except validate.ValidationError as error:
        yield str(error.message)


def lost(given: Any, read: Any, where: str = "") -> Iterator[str]:
    """Keys that a model did not take over: it accepts unknown ones, and forgets them."""
    if isinstance(given, dict):
        known = read if isinstance(read, dict) else {}
        for key, value in given.items():
            if key in known:
                yield from lost(value, known[key], f"{where}.{key}")
            elif value != {}:
                yield f"{where}.{key} is not known"
    elif isinstance(given, list):
        for at, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from lost(one, other, f"{where}[{at}]")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [*KINDS, "results"])
def test_schemas(name: str, version: str) -> None:
    """No unknown key, no wrong type, in each version of Kubernetes; the Job inside a JobSet too, as a Job of its own."""
    found = documents(KUBERNETES / name / f"{name}.yaml" if name != "results" else KUBERNETES / "results.yaml")
    if name in KINDS:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_spec(name)}
        found = [*found, job]
    assert [text for one in found for text in complaints(one, version)] == []


def renamed(document: Any, key: str, new: str) -> Any:
    """The document with a key renamed wherever it stands."""
    if isinstance(document, dict):
        return {new if name == key else name: renamed(value, key, new) for name, value in document.items()}
    return [renamed(one, key, new) for one in document] if isinstance(document, list) else document


@pytest.mark.parametrize(
    ("name", "kind", "key", "new"),
    [
        ("job", "Job", "completionMode", "completionMoed"),
        ("job", "Job", "capabilities", "capabilites"),
        ("job", "Job", "terminationMessagePolicy", "terminationMessagePolice"),
        ("job", "Job", "medium", "Medium"),
        ("job", "Service", "publishNotReadyAddresses", "publishNotReady"),
        ("jobset", "JobSet", "enableDNSHostnames", "enableDnsHostnames"),
        ("jobset", "JobSet", "maxRestarts", "maxRestart"),
        ("jobset", "JobSet", "capabilities", "capabilites"),
        ("trainjob", "TrainJob", "numNodes", "nodes"),
        ("trainjob", "TrainJob", "resourcesPerNode", "resources"),
        ("trainjob", "TrainJob", "runtimeRef", "runtime"),
        ("trainjob", "TrainingRuntime", "mlPolicy", "mlpolicy"),
        ("trainjob", "TrainingRuntime", "replicatedJobs", "jobs"),
    ],
)
def test_a_wrong_key_is_seen(name: str, kind: str, key: str, new: str) -> None:
    """The checks themselves."""
    document = objects(name)[kind]
    assert [*complaints(renamed(document, key, new), VERSIONS[-1])]
    assert renamed(document, key, new) != document


@pytest.mark.parametrize("value", ["two", {"x": 1}, [2]])
def test_a_wrong_type_is_seen(value: Any) -> None:
    """In a kind of Kubernetes and in a custom one."""
    job, trainjob = objects("job")["Job"], objects("trainjob")["TrainJob"]
    job["spec"]["completions"] = trainjob["spec"]["trainer"]["numNodes"] = value
    assert [*complaints(job, VERSIONS[-1])]
    assert [*complaints(trainjob, VERSIONS[-1])]


# kustomize.


@pytest.mark.parametrize("name", KINDS)
def test_the_head_reaches_every_place(name: str, tmp_path: Path) -> None:
    """Nodes, GPUs and the image are edited once."""
    site = copied(tmp_path, GPUCLUSTER_NODES="4", GPUCLUSTER_GPUS="3", IMAGE="registry.example.org/a:1")
    found = built(site / name)
    spec = job_spec(name, found)
    if name == "trainjob":
        trainer = found["TrainJob"]["spec"]["trainer"]
        limits, image = trainer["resourcesPerNode"]["limits"], trainer["image"]
        numbers = [trainer["numNodes"], trainer["numProcPerNode"] + 1]
    else:
        container = spec["template"]["spec"]["containers"][0]
        limits, image = container["resources"]["limits"], container["image"]
        numbers = [spec["completions"], spec["parallelism"]]
    assert numbers == [4, 4]
    assert (limits["nvidia.com/gpu"], image) == (3, "registry.example.org/a:1")


def test_all_overlays_are_tested() -> None:
    """Those that the client's documents and the issue name."""
    assert set(OVERLAYS) == {"infiniband-sriov", "infiniband-shared", "efa", "gb200", "gb200-dra", "kueue"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay(name: str) -> None:
    """Builds, is a sound Job, and adds what it is for; the namespace is one."""
    found = built(KUBERNETES / "overlays" / name)
    assert {one["metadata"]["namespace"] for one in found.values()} == {"default"}
    known = [one for kind, one in found.items() if kind != "ComputeDomain"]
    assert [text for one in known for text in complaints(one, "1.37")] == []
    job = found["Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    limits, gpus = container["resources"]["limits"], found["ConfigMap"]["data"]["GPUCLUSTER_GPUS"]
    if name == "gb200-dra":
        (request,) = found["ResourceClaimTemplate"]["spec"]["spec"]["devices"]["requests"]
        assert str(request["exactly"]["count"]) == gpus
        assert "nvidia.com/gpu" not in limits
    else:
        assert str(limits["nvidia.com/gpu"]) == gpus
    added = {
        "infiniband-sriov": "k8s.v1.cni.cncf.io/networks" in job["spec"]["template"]["metadata"].get("annotations", {})
        and limits.get("nvidia.com/infiniband") == 8,
        "infiniband-shared": "rdma/hca_shared_devices_a" in limits,
        "efa": "vpc.amazonaws.com/efa" in limits and "hugepages-2Mi" in limits,
        "gb200": [one["name"] for one in container["resources"].get("claims", ())] == ["nvlink-channel"],
        "gb200-dra": [one["name"] for one in container["resources"].get("claims", ())] == ["nvlink-channel", "gpus"],
        "kueue": "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"],
    }
    assert [overlay for overlay, is_added in added.items() if is_added] == [name]
    claimed = {one["name"] for one in container["resources"].get("claims", ())}
    assert claimed == {one["name"] for one in job["spec"]["template"]["spec"].get("resourceClaims", ())}


def test_overlays_are_chained(tmp_path: Path) -> None:
    """By one word in the head: Kueue on InfiniBand."""
    site = copied(tmp_path)
    file = site / "overlays" / "kueue" / "kustomization.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("../../job", "../infiniband-shared"), encoding="utf-8")
    job = built(site / "overlays" / "kueue")["Job"]
    assert "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    assert "rdma/hca_shared_devices_a" in job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_an_overlay_with_a_wrong_path_is_seen(tmp_path: Path) -> None:
    """The check itself: kustomize refuses a patch that fits nothing."""
    built(KUBERNETES / "job")  # skips where there is no kustomize
    site = copied(tmp_path)
    file = site / "overlays" / "gb200" / "kustomization.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("containers/0", "container/0"), encoding="utf-8")
    with pytest.raises(AssertionError, match="container/0"):
        built(site / "overlays" / "gb200")


# node-problem-detector.


def test_node_problem_detector() -> None:
    """Its configuration: the names that it knows, a timeout within its own, a preset condition, and our command."""
    config = json.loads((KUBERNETES / "node-problem-detector" / "gpucluster.json").read_text(encoding="utf-8"))
    own = config["pluginConfig"]
    assert set(config) == {"plugin", "pluginConfig", "source", "metricsReporting", "conditions", "rules"}
    assert set(own) <= {
        "invoke_interval", "timeout", "max_output_length", "concurrency", "enable_message_change_based_condition_update",
        "skip_initial_status",
    }  # fmt: skip
    assert config["plugin"] == "custom"
    assert own["max_output_length"] == healthcheck.MOST_OUTPUT_BYTES
    (rule,) = config["rules"]
    assert set(rule) == {"type", "condition", "reason", "path", "args", "timeout"}
    assert (rule["type"], rule["condition"]) == ("permanent", config["conditions"][0]["type"])
    assert set(config["conditions"][0]) == {"type", "reason", "message"}
    assert 15 < float(rule["timeout"].removesuffix("s")) <= float(own["timeout"].removesuffix("s")) <= 60
    assert main._parse(rule["args"]).command == "kubernetes-condition"


def test_the_page_explains_every_setting() -> None:
    """Each line of the head, each overlay, and each privilege."""
    page = (REPOSITORY / "docs" / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
    names = [*objects("job")["ConfigMap"]["data"], *OVERLAYS, "IPC_LOCK", "activeDeadlineSeconds", "gpucluster.json"]
    assert [name for name in names if f"`{name}`" not in page] == []
