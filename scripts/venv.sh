# Sourced: makes .venv if it is missing, installs the package with its test tools at pinned versions, and leaves
# $python set. Nothing is installed twice: a stamp remembers what the environment was made from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python

if [ ! -x "$python" ]; then
    base=""
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            base=$candidate
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "scripts: Python 3.11 or newer is needed, and none was found; set PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "making .venv with $("$base" --version)"
    "$base" -m venv .venv
fi

stamp=.venv/.installed-from
made_from=$(cat pyproject.toml scripts/constraints.txt | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$made_from" ]; then
    echo "installing into .venv (torch is large; this happens once)"
    "$python" -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable '.[dev]'
    echo "$made_from" >"$stamp"
fi
