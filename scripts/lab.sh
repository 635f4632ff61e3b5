#!/usr/bin/env bash
# Train the small model with four attentions on one GPU (about five minutes on an H200), then draw
# and tabulate the runs, and count the rows on which the paper's fix acts.
#   scripts/lab.sh DATASET [flags of train.py]     a folder below data/, or a path
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: scripts/lab.sh DATASET [flags of train.py]" >&2; exit 2; }
dataset="$1"
python="$(command -v python3 || command -v python)"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi

run() { # name, config, flags; a loss that is not finite (3) is a result
    "$python" train.py "configs/$2.py" "--dataset=$dataset" "--out_dir=out/lab/$1" "${@:3}" || [ $? -eq 3 ]
}
run original lab_original "${@:2}"
run stable lab_stable "${@:2}"
run stable_no_floor lab_stable --precision=official,stable=paper,row_sum_floor=0 "${@:2}"
run control lab_control "${@:2}"

runs=(out/lab/original out/lab/stable out/lab/control out/lab/stable_no_floor)
"$python" scripts/plot_runs.py "${runs[@]}" --png=out/lab/loss.png \
    --labels="original,paper's fix with the authors' floor,control (sdpa),paper's fix as printed" \
    --title="30M parameters, 16,384 tokens a step, tiles of 512 keys"
"$python" scripts/runs_table.py "${runs[@]}"
"$python" scripts/tied_maxima.py out/lab/stable
"$python" scripts/tied_maxima.py out/lab/stable_no_floor
