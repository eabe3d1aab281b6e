"""deploy/terraform: read by python-hcl2 everywhere; by Terraform, with a stand-in for the recipe, where that is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is not installed")

FOLDER = REPOSITORY / "deploy" / "terraform"
FILES = sorted(FOLDER.glob("*.tf"))
EXAMPLE = FOLDER / "terraform.tfvars.example"
FROM_ENVRC = {"region", "iam_token", "iam_project_id", "iam_tenant_id", "vpc_subnet_id"}
RECIPE = {
    *FROM_ENVRC, "company_name", "o11y_iam_project_id", "o11y_iam_tenant_id", "o11y_iam_group_id", "o11y_profile",
    "public_o11y_enabled", "filestore_controller_spool", "filestore_jail", "filestore_jail_submounts",
    "node_local_jail_submounts", "slurm_operator_version", "slurm_nodeset_workers", "slurm_login_ssh_root_public_keys",
    "nccl_benchmark_enable", "backups_enabled", "backups_password", "backups_schedule", "backups_prune_schedule",
    "backups_retention",
}  # fmt: skip
"""Variables of soperator/installations/example/variables.tf at soperator-v1.20.1-1 (commit b2a14f03), those that we set."""
LOGIN = """
resource "terraform_data" "login" {
  provisioner "local-exec" { command = "printf 'ssh root@\\"203.0.113.7\\"\\n' > ${path.root}/login.sh" }
}
"""
VALUES = {f"TF_VAR_{name}": f"{name}-x" for name in FROM_ENVRC}
ONE_GPU = """[{
  size = 4, nodes_per_nodegroup = 1, max_unavailable_percent = 50
  resource = { platform = "gpu-h200-sxm", preset = "1gpu-16vcpu-200gb" }
  boot_disk = { type = "NETWORK_SSD", size_gibibytes = 256, block_size_kibibytes = 4 }
}]"""


def blocks(kind: str, files: list[Path] = FILES) -> dict[str, dict[str, Any]]:
    """The blocks of one kind, by name."""
    found = {}
    for file in files:
        for block in hcl2.loads(file.read_text(encoding="utf-8")).get(kind, []):
            for name, body in block.items():
                found[name.strip('"')] = body
    return found


def problems(files: list[Path]) -> list[str]:
    """Variables and outputs that nobody explains, and variables that nothing reads."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.name != "variables.tf")
    variables, outputs = blocks("variable", files), blocks("output", files)
    silent = [name for name, body in {**variables, **outputs}.items() if len(str(body.get("description", ""))) < 20]
    return [f"{name} is not described" for name in silent] + [
        f"{name} is not used" for name in variables if not re.search(rf"\bvar\.{name}\b", text)
    ]


def read_by_the_pages() -> set[str]:
    """The outputs that our pages ask Terraform for."""
    pages = [page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs" / "how-to").glob("*.md")]
    return {name for page in pages for name in re.findall(r"terraform output (?:-\w+ )?(\w+)", page)}


def test_the_first_line_says_that_it_was_never_applied() -> None:
    """Of each file."""
    for file in [*FILES, EXAMPLE]:
        assert file.read_text(encoding="utf-8").startswith("# Never applied"), file.name


def test_variables_and_outputs() -> None:
    """Each variable is used and explained, each output is explained, and the pages ask for no other."""
    assert len(FILES) == 3
    assert problems(FILES) == []
    asked = read_by_the_pages()
    assert {"accept_command", "slurm_login_ip"} <= asked <= set(blocks("output"))


def test_the_check_of_variables(tmp_path: Path) -> None:
    """It sees one that is not used, and one without a word."""
    planted = tmp_path / "planted.tf"
    planted.write_text('variable "forgotten" {}\noutput "silent" {\n  value = 1\n}\n', encoding="utf-8")
    assert problems([planted]) == ["forgotten is not described", "silent is not described", "forgotten is not used"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_syntax_error_is_seen(file: Path) -> None:
    """A brace that is gone."""
    text = file.read_text(encoding="utf-8").rstrip()
    with pytest.raises(Exception, match=r"(?i)unexpected|expected"):
        hcl2.loads(text.removesuffix("}"))


def test_the_recipe_is_pinned_and_knows_what_is_set() -> None:
    """By a tag whose version is that of the operator."""
    module = blocks("module")["soperator"]
    ref = re.search(r"\?ref=soperator-v([\d.]+)-\d+", module["source"])
    assert ref is not None
    assert module["slurm_operator_version"].strip('"') == ref[1]
    assert {name for name in module if not name.startswith("__")} - {"source"} <= RECIPE


def test_the_example_sets_what_the_environment_does_not() -> None:
    """Every other variable; no token and no key of somebody."""
    given = {name for name in hcl2.loads(EXAMPLE.read_text(encoding="utf-8")) if not name.startswith("__")}
    assert given == set(blocks("variable")) - FROM_ENVRC
    page = (REPOSITORY / "docs" / "how-to" / "terraform.md").read_text(encoding="utf-8")
    assert [name for name in given if f"`{name}`" not in page] == []


def checkout(folder: Path) -> Path:
    """The files, with a module that takes the same variables in place of the recipe; it only writes login.sh."""
    for file in FILES:
        text = re.sub(r'source = "git::[^"]*"', 'source = "./recipe"', file.read_text(encoding="utf-8"))
        (folder / file.name).write_text(text, encoding="utf-8")
    shutil.copy(EXAMPLE, folder / "terraform.tfvars")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "main.tf").write_text(
        "".join(f'variable "{name}" {{}}\n' for name in sorted(RECIPE)) + LOGIN, encoding="utf-8"
    )
    return folder


def terraform(folder: Path, *arguments: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run Terraform, which reaches nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    given = {**kept, **VALUES, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", **values}
    command = ["terraform", f"-chdir={folder}", *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def initialized(tmp_path: Path) -> Path:
    """A folder in which ``terraform init`` was done."""
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed, and no package registry has it")
    done = terraform(checkout(tmp_path), "init", "-backend=false", "-no-color")
    assert done.returncode == 0, done.stderr
    return tmp_path


def outputs(folder: Path) -> dict[str, Any]:
    """What ``terraform output`` prints."""
    return {name: one["value"] for name, one in json.loads(terraform(folder, "output", "-json").stdout).items()}


def test_terraform_takes_it(initialized: Path) -> None:
    """Format, types and expressions; applied with the stand-in, its outputs are the line that starts the job."""
    assert terraform(FOLDER, "fmt", "-check", "-diff").stdout == ""
    assert terraform(initialized, "validate", "-no-color").returncode == 0
    applied = terraform(initialized, "apply", "-auto-approve", "-no-color")
    assert applied.returncode == 0, applied.stderr
    again = terraform(initialized, "apply", "-refresh-only", "-auto-approve", "-no-color")
    assert again.returncode == 0, again.stderr
    found = outputs(initialized)
    assert (found["nodes"], found["gpus_per_node"], found["expect"]) == (2, 8, "nodes=2,gpus_per_node=8")
    assert (found["shared"], found["scratch"], found["slurm_login_ip"]) == ("/mnt/shared", ["/mnt/scratch"], "203.0.113.7")
    words = shlex.split(found["accept_command"])
    assert words[:3] == ["sbatch", "--nodes=2", "--gpus-per-node=8"]
    assert (REPOSITORY / words[4]).is_file()
    assert found["accept_command"] in (REPOSITORY / "docs" / "how-to" / "terraform.md").read_text(encoding="utf-8")


def test_one_gpu_a_node(initialized: Path) -> None:
    """Four nodes of one H200, as in the fourth document."""
    applied = terraform(initialized, "apply", "-auto-approve", "-no-color", f"-var=slurm_nodeset_workers={ONE_GPU}")
    assert applied.returncode == 0, applied.stderr
    assert outputs(initialized)["expect"] == "nodes=4,gpus_per_node=1"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("slurm_login_ssh_root_public_keys=[]", "Give at least one public key"),
        ("filestore_jail_submounts=[]", "Give at least one shared file system"),
        (f"slurm_nodeset_workers={ONE_GPU.replace('1gpu-16vcpu-200gb', '8gpu-128vcpu-1600gb')}", "infiniband_fabric"),
        (f"slurm_nodeset_workers={ONE_GPU.replace('1gpu-16vcpu-200gb', '16vcpu-64gb')}", "Give a preset with GPUs"),
        ("slurm_nodeset_workers=[]", "Give one node set"),
    ],
)
def test_wrong_values_are_refused(value: str, sentence: str, initialized: Path) -> None:
    """By a sentence that says what to give, before anything is made."""
    planned = terraform(initialized, "plan", "-no-color", f"-var={value}")
    assert planned.returncode == 1
    assert sentence in " ".join(planned.stderr.replace("│", " ").split())


def test_terraform_sees_a_syntax_error(initialized: Path) -> None:
    """The check above fails on one."""
    text = (initialized / "main.tf").read_text(encoding="utf-8")
    (initialized / "main.tf").write_text(text.replace("var.region", "var.regio", 1), encoding="utf-8")
    assert "undeclared" in terraform(initialized, "validate", "-no-color").stderr
