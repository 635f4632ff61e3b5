#!/usr/bin/env bash
# The loss explosion and what holds, five seeds an arm: set up, train, tabulate, draw.
#   scripts/reproduce.sh [DATASET] [flags of rounding_map.py and train.py]
# With a GPU: 30M parameters, 5 mantissa bits, minutes of an H200 a seed, OpenWebText. Without: 49,000
# parameters, 2 bits, 17 minutes on 2 cores, the sources of Python. DATASET, a folder below data/ or a path,
# takes the corpus's place. Interrupted, it goes on where it was. Everything is below out/grids.
set -euo pipefail
cd "$(dirname "$0")/.."
dataset=()
if [ $# -ge 1 ] && [[ "$1" != -* ]]; then
    dataset=("--dataset=$1")
    shift
fi

source scripts/setup.sh torch numpy matplotlib tqdm

if "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    grid=fast_gpu
    jobs=5
else
    grid=fast_cpu
    jobs=$(nproc)
    [ -f data/pysource/meta.json ] || "$PYTHON" data/pysource/prepare.py
fi
"$PYTHON" scripts/rounding_map.py "configs/grids/$grid.py" --jobs="$jobs" "${dataset[@]}" "$@"
