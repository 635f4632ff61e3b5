# Sourced by quickstart.sh, reproduce.sh and test.sh: sets PYTHON to an interpreter that has the modules named as
# arguments, and installs requirements.txt where it must.
#   1. the active python, if it has them all: nothing is installed;
#   2. else the active virtual environment, or .venv made here, gets what is pinned and missing.
# Where the active python holds torch and Triton, .venv builds on its packages and leaves them alone.

has() { "$1" -c "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))" "${@:2}" 2>/dev/null; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

PYTHON=""
for name in python3 python; do
    if command -v "$name" >/dev/null && recent "$name"; then PYTHON="$(command -v "$name")"; break; fi
done
[ -n "$PYTHON" ] || { echo "error: no Python 3.11 or later on the PATH" >&2; exit 1; }

if has "$PYTHON" "$@"; then
    echo "using $PYTHON, which has $*"
else
    if [ -z "${VIRTUAL_ENV:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" = base ]; then
        if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
            share=""
            if has "$PYTHON" torch triton; then share="--system-site-packages"; fi
            "$PYTHON" -m venv --clear $share .venv || {
                echo "error: $PYTHON could not make a virtual environment in .venv (on Debian: python3-venv)" >&2
                exit 1
            }
        fi
        PYTHON="$PWD/.venv/bin/python"
    fi
    if ! has "$PYTHON" "$@"; then
        echo "installing requirements.txt into $("$PYTHON" -c 'import sys; print(sys.prefix)') (a few minutes) …"
        pins="$(mktemp)"
        # what is pinned here and not importable there yet
        sed 's/ *#.*//' requirements.txt | while read -r pin; do
            [ -n "$pin" ] || continue
            has "$PYTHON" "${pin%%==*}" || echo "$pin" >>"$pins"
        done
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$pins" || {
            echo "error: pip could not install requirements.txt; its own message is above" >&2
            exit 1
        }
        rm -f "$pins"
    fi
fi
