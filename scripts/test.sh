#!/usr/bin/env bash
# All tests, then lint and format. On a machine with a GPU the tests marked gpu run too.
# Arguments go to pytest: scripts/test.sh -k bias
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/setup.sh torch numpy matplotlib tqdm pytest

parallel=()
if "$PYTHON" -c "import xdist" 2>/dev/null; then parallel=(-n auto); fi
"$PYTHON" -m pytest "${parallel[@]}" "$@" # what needs a missing optional package is skipped
if "$PYTHON" -m ruff --version >/dev/null 2>&1; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
else
    echo "ruff is not installed here: lint and format were not checked"
fi
