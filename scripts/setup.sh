# Sourced by quickstart.sh and test.sh: sets PYTHON to an interpreter that has the modules named as
# arguments, and installs requirements.txt where it must.
#   1. the active python, if it has them all: nothing is installed;
#   2. the active virtual environment, or .venv made here: pip installs what is pinned and missing.
# A python that already holds torch keeps it: .venv then builds on that python's packages.

modules="$*"

has() { "$1" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))" "${@:2}"; }

active="$(command -v python || command -v python3)" || { echo "error: no python on the PATH" >&2; exit 1; }
if ! "$active" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: Python 3.11 or later is needed; $active is $("$active" -V)" >&2
    exit 1
fi

if has "$active" $modules; then
    PYTHON="$active"
    echo "using $PYTHON, which has $modules"
else
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
        PYTHON="$active"
    else
        share=""
        if has "$active" torch triton; then share="--system-site-packages"; fi
        [ -x .venv/bin/python ] || "$active" -m venv $share .venv || exit 1
        PYTHON="$PWD/.venv/bin/python"
    fi
    if ! has "$PYTHON" $modules; then
        echo "installing requirements.txt into $("$PYTHON" -c 'import sys; print(sys.prefix)') (a few minutes) …"
        pins="$(mktemp)"
        # what is pinned here and not importable there yet
        sed 's/ *#.*//' requirements.txt | while read -r pin; do
            [ -n "$pin" ] || continue
            has "$PYTHON" "${pin%%==*}" || echo "$pin" >>"$pins"
        done
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$pins" || {
            echo "error: pip could not install requirements.txt; is the package index reachable?" >&2
            exit 1
        }
        rm -f "$pins"
    fi
fi
