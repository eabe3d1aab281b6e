# Never applied: Terraform 1.11 validated and planned it with a stand-in for the recipe. docs/how-to/terraform.md.

locals {
  workers       = one(var.slurm_nodeset_workers)
  gpus_per_node = tonumber(regex("^([0-9]+)gpu-", local.workers.resource.preset)[0])
  shared        = var.filestore_jail_submounts[0].mount_path
  login_script  = "${path.root}/login.sh" # the recipe writes it at the end
}

output "nodes" {
  description = "How many GPU nodes there are: sbatch --nodes."
  value       = local.workers.size
}

output "gpus_per_node" {
  description = "How many GPUs a node has: sbatch --gpus-per-node."
  value       = local.gpus_per_node
}

output "expect" {
  description = "What was ordered, for --gpucluster-expect."
  value       = "nodes=${local.workers.size},gpus_per_node=${local.gpus_per_node}"
}

output "shared" {
  description = "The shared folder for the installation and the results."
  value       = local.shared
}

output "scratch" {
  description = "The scratch folders of each node."
  value       = var.node_local_jail_submounts[*].mount_path
}

output "accept_command" {
  description = "To enter on the login node, in a checkout of pytest-gpucluster below the shared folder."
  value = join(" ", [
    "sbatch --nodes=${local.workers.size} --gpus-per-node=${local.gpus_per_node}",
    "--export=ALL,VENV=${local.shared}/venv deploy/slurm/accept.sbatch",
    "--gpucluster-expect=nodes=${local.workers.size},gpus_per_node=${local.gpus_per_node}",
  ])
}

output "slurm_login_ip" {
  description = "The address of the login node, from the login.sh of the recipe; after `terraform apply -refresh-only`."
  value       = fileexists(local.login_script) ? regex("@\"([^\"]+)\"", file(local.login_script))[0] : "run terraform apply -refresh-only"

  depends_on = [module.soperator]
}

output "login_command" {
  description = "Logs in to the login node."
  value       = "./login.sh -k ~/.ssh/id_ed25519"
}
