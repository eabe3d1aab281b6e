#!/bin/bash
# One acceptance run for a CI job: `accept.sh quick`. Exit code 0: the verdict is ACCEPTED. docs/how-to/ci.md explains each line.

# --- a site edits these ---
VENV=${VENV:-/shared/gpucluster}        # a folder with bin/activate, the same path on all nodes
RUNS=${RUNS:-/shared/gpucluster-runs}   # every run is kept here, on a path that all nodes share
START=${START:-pytest --pyargs tests_acceptance}   # one node; of several: docs/how-to/ci.md
EXPECT=${EXPECT:-nodes=1,gpus_per_node=8}          # what was promised
KEY=${KEY:-}                            # an SSH key that signs the bundle; empty: it is unsigned
# --------------------------

# shellcheck source=/dev/null
. "$VENV/bin/activate" || exit 2
level=${1:-standard} last=$RUNS/accepted-${1:-standard} results=$RUNS/$(date -u +%Y%m%dT%H%M%SZ)-${1:-standard}-$$
options=("--gpucluster-level=$level" "--gpucluster-expect=$EXPECT" "--gpucluster-results=$results")
options+=("--junitxml=$results/junit.xml" "--gpucluster-summary=$results/summary.md")
mkdir -p "$results"
# shellcheck disable=SC2086  # words
$START -p no:cacheprovider --gpucluster-gate "${options[@]}"
code=$?
{ [ ! -e "$last" ] || gpucluster compare --markdown "$last" "$results"; } > "$results/compare.md"
gpucluster bundle "$results" -o "$results.zip" ${KEY:+"--key=$KEY"}
if [ "$code" -eq 0 ]; then ln -sfn "$results" "$last"; fi
rm -rf gpucluster-results && cp -r "$results" gpucluster-results && cp "$results.zip" gpucluster-results/bundle.zip
cat "$results/compare.md" >> "${GITHUB_STEP_SUMMARY:-/dev/null}"
if command -v buildkite-agent; then cat "$results"/*.md | buildkite-agent annotate --context gpucluster; fi
exit "$code"
