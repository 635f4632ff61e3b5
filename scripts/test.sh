#!/usr/bin/env bash
# All tests, then lint and format. On a machine with a GPU the tests marked gpu run too.
# Arguments go to pytest: scripts/test.sh -k bias
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/setup.sh torch numpy matplotlib tqdm pytest

"$PYTHON" -m pytest "$@" # what needs a missing optional package is skipped
if "$PYTHON" -m ruff --version >/dev/null 2>&1; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
else
    echo "ruff is not installed here: lint and format were not checked"
fi
