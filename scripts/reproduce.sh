#!/usr/bin/env bash
# The loss explosion and what holds, five seeds an arm: set up, train, tabulate, draw.
#   scripts/reproduce.sh                        without a GPU: 49,000 parameters, about 15 minutes on 2 cores
#   scripts/reproduce.sh DATASET [flags of rounding_map.py and train.py]
#                                               on a GPU: 30M parameters, 5 mantissa bits, 2 to 3 minutes of an H200 a seed;
#                                               DATASET is a folder below data/, or a path
# Interrupted, it goes on where it was. Everything is below out/grids.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/setup.sh torch numpy matplotlib tqdm

if "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    [ $# -ge 1 ] || { echo "usage: scripts/reproduce.sh DATASET [flags]" >&2; exit 2; }
    grid=fast_gpu
    flags=("--dataset=$1" --jobs=5 "${@:2}")
else
    grid=fast_cpu
    [ -f data/pysource/meta.json ] || "$PYTHON" data/pysource/prepare.py
    flags=("--jobs=$(nproc)" "$@")
fi
"$PYTHON" scripts/rounding_map.py "configs/grids/$grid.py" "${flags[@]}"
