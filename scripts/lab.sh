#!/usr/bin/env bash
# Train the small model with the three attentions on one GPU (about four minutes on an H200), then
# draw and tabulate the runs.
#   scripts/lab.sh DATASET     a folder below data/, or a path, with train.bin and val.bin
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: scripts/lab.sh DATASET [train.py flags]" >&2; exit 2; }
dataset="$1"
python="$(command -v python || command -v python3)"

for arm in original stable control; do
    "$python" train.py "configs/lab_$arm.py" "--dataset=$dataset" "--out_dir=out/lab/$arm" "${@:2}" || true
done
"$python" scripts/plot_runs.py out/lab/{original,stable,control} --png=out/lab/loss.png \
    --title="30M parameters, 16,384 tokens a step"
"$python" scripts/runs_table.py out/lab/{original,stable,control}
