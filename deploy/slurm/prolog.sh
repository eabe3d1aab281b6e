#!/bin/bash
# slurm.conf: Prolog=/etc/slurm/prolog.sh
# A prolog that fails drains the node ("Prolog error"), and holds the job: it stays held after the node is resumed
# (scontrol release JOB). Slurm forbids its own commands here, so nothing is drained by this script itself.

# --- a site edits these ---
VENV=${VENV:-/opt/gpucluster}   # a folder with bin/gpucluster on the node's own disk
# --------------------------

exec env GPUCLUSTER_DRAIN=0 timeout --kill-after=1 15 "$VENV/bin/gpucluster" healthcheck
