# Never applied: Terraform 1.11 validated and planned it with a stand-in for the recipe. docs/how-to/terraform.md.

variable "region" {
  description = "Region of the project: TF_VAR_region of the recipe's .envrc."
  type        = string
}

variable "iam_token" {
  description = "Token of Nebius, good for 12 hours: TF_VAR_iam_token of the recipe's .envrc. Never write it into a file."
  type        = string
  sensitive   = true
}

variable "iam_project_id" {
  description = "ID of the project: TF_VAR_iam_project_id of the recipe's .envrc."
  type        = string
}

variable "iam_tenant_id" {
  description = "ID of the tenant: TF_VAR_iam_tenant_id of the recipe's .envrc."
  type        = string
}

variable "vpc_subnet_id" {
  description = "ID of the subnet: TF_VAR_vpc_subnet_id of the recipe's .envrc."
  type        = string
}

variable "company_name" {
  description = "Name of the cluster: small letters, digits and hyphens."
  type        = string
}

variable "slurm_nodeset_workers" {
  description = "The GPU nodes: one node set. infiniband_fabric comes from Nebius; a node with one GPU has no gpu_cluster."
  type = list(object({
    size                    = number
    nodes_per_nodegroup     = number
    max_unavailable_percent = number
    resource                = object({ platform = string, preset = string })
    boot_disk               = object({ type = string, size_gibibytes = number, block_size_kibibytes = number })
    gpu_cluster             = optional(object({ infiniband_fabric = string }))
  }))

  validation {
    condition     = length(var.slurm_nodeset_workers) == 1
    error_message = "Give one node set: the recipe takes no more."
  }
  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : can(regex("^[0-9]+gpu-", set.resource.preset))])
    error_message = "Give a preset with GPUs, as 8gpu-128vcpu-1600gb or 1gpu-16vcpu-200gb."
  }
  validation {
    condition = alltrue([
      for set in var.slurm_nodeset_workers :
      startswith(set.resource.preset, "1gpu-") ? set.gpu_cluster == null : try(length(set.gpu_cluster.infiniband_fabric) > 0, false)
    ])
    error_message = "Give gpu_cluster.infiniband_fabric for nodes with 8 GPUs, and no gpu_cluster for nodes with 1 GPU."
  }
}

variable "filestore_jail" {
  description = "The root file system that all nodes share, home folders included: a size, or the id of one that exists."
  type = object({
    existing = optional(object({ id = string }))
    spec     = optional(object({ size_gibibytes = number, block_size_kibibytes = number }))
  })
}

variable "filestore_jail_submounts" {
  description = "More shared file systems. The first one holds the installation and the results of the acceptance."
  type = list(object({
    name       = string
    mount_path = string
    existing   = optional(object({ id = string }))
    spec       = optional(object({ size_gibibytes = number, block_size_kibibytes = number }))
  }))

  validation {
    condition     = length(var.filestore_jail_submounts) > 0
    error_message = "Give at least one shared file system, for the results."
  }
}

variable "node_local_jail_submounts" {
  description = "Scratch: a disk of each node by itself."
  type = list(object({
    name            = string
    mount_path      = string
    size_gibibytes  = number
    disk_type       = string
    filesystem_type = string
  }))
  default = []
}

variable "slurm_login_ssh_root_public_keys" {
  description = "Public SSH keys that may log in to the login node as root."
  type        = list(string)

  validation {
    condition     = length(var.slurm_login_ssh_root_public_keys) > 0 && alltrue([for key in var.slurm_login_ssh_root_public_keys : startswith(key, "ssh-")])
    error_message = "Give at least one public key, as in ~/.ssh/id_ed25519.pub."
  }
}
