#!/bin/bash
# slurm.conf: HealthCheckProgram=/etc/slurm/healthcheck.sh  HealthCheckInterval=300  HealthCheckNodeState=ANY
# Reads the health of this node's GPUs within 15 s, and runs nothing on them. Slurm ends it after 60 s.

# --- a site edits these ---
VENV=${VENV:-/opt/gpucluster}                    # a folder with bin/gpucluster on the node's own disk
export GPUCLUSTER_DRAIN=${GPUCLUSTER_DRAIN:-0}   # 1: drains the node with its reason, and frees it from reasons of ours only
# --------------------------

exec timeout --kill-after=1 15 "$VENV/bin/gpucluster" healthcheck
