#!/usr/bin/env bash
# From a fresh clone to loss curves of the original, the stabilized and other attentions, on
# whatever machine this is. Under 10 minutes on 2 cores without a GPU. Run it again and only the
# training is repeated.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/setup.sh torch numpy matplotlib tqdm

if [ ! -f data/pysource/meta.json ]; then
    echo "preparing a corpus from the Python standard library's sources …"
    "$PYTHON" data/pysource/prepare.py
fi

"$PYTHON" scripts/quickstart.py "$@"
