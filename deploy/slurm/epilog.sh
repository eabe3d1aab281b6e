#!/bin/bash
# slurm.conf: Epilog=/etc/slurm/epilog.sh
# An epilog that fails drains the node ("Epilog error"); the job that has just ended keeps its own outcome.
# Slurm forbids its own commands here, so nothing is drained by this script itself.

# --- a site edits these ---
VENV=${VENV:-/opt/gpucluster}   # a folder with bin/gpucluster on the node's own disk
# --------------------------

exec env GPUCLUSTER_DRAIN=0 timeout --kill-after=1 15 "$VENV/bin/gpucluster" healthcheck
