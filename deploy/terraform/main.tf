# Never applied: Terraform 1.11 validated and planned it with a stand-in for the recipe. docs/how-to/terraform.md.

terraform {
  required_version = ">= 1.8.0"
}

# The recipe of Nebius: Kubernetes, Soperator (Slurm), shared file systems, login node. It brings its own providers,
# and writes login.sh here. What is not set has the recipe's default.
module "soperator" {
  source = "git::https://github.com/nebius/nebius-solution-library.git//soperator/installations/example?ref=soperator-v1.20.1-1"

  region         = var.region
  iam_token      = var.iam_token
  iam_project_id = var.iam_project_id
  iam_tenant_id  = var.iam_tenant_id
  vpc_subnet_id  = var.vpc_subnet_id
  company_name   = var.company_name

  slurm_operator_version           = "1.20.1" # of the same release as ref
  slurm_nodeset_workers            = var.slurm_nodeset_workers
  slurm_login_ssh_root_public_keys = var.slurm_login_ssh_root_public_keys

  filestore_controller_spool = { spec = { size_gibibytes = 128, block_size_kibibytes = 4 } }
  filestore_jail             = var.filestore_jail
  filestore_jail_submounts   = var.filestore_jail_submounts
  node_local_jail_submounts  = var.node_local_jail_submounts

  # Nothing else may run on the GPUs while they are judged.
  nccl_benchmark_enable = false

  # No logs leave for Nebius, and no backups. The recipe wants these names all the same.
  public_o11y_enabled    = false
  o11y_iam_project_id    = var.iam_project_id
  o11y_iam_tenant_id     = var.iam_tenant_id
  o11y_iam_group_id      = "group-unused"
  o11y_profile           = "unused"
  backups_enabled        = "force_disable"
  backups_password       = "unused"
  backups_schedule       = "@daily-random"
  backups_prune_schedule = "@daily-random"
  backups_retention      = { keepDaily = 1 }
}
