#!/usr/bin/env bash
# usage: scripts/install.sh EXTRAS     e.g. scripts/install.sh train
# Makes the virtual environment .venv and installs loongforge[EXTRAS] into it with the versions of constraints.txt.
# PYTHON names the interpreter (default python3).  A second call with the same EXTRAS changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
python=${PYTHON:-python3}
venv_python=.venv/bin/python

fail() {
    echo "install: $*" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "no $python found; install Python 3.11, or set PYTHON to an interpreter"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    fail "Python 3.10 to 3.13 is needed, $python is $("$python" --version 2>&1); set PYTHON to another interpreter"

stamp=.venv/installed-$extras
state=$(cat setup.py scripts/constraints.txt | cksum)
if [ -x "$venv_python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
    exit 0
fi

if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        # Some distributions ship Python without ensurepip; the interpreter's own pip can fill the environment.
        rm -rf .venv
        "$python" -m venv --without-pip .venv ||
            fail "$python cannot make a virtual environment; install its venv module (Debian: python3-venv)"
        "$python" -m pip --python .venv install -qq pip ||
            fail "$python has neither ensurepip nor pip; install one of them (Debian: python3-venv or python3-pip)"
    fi
fi

install() {
    "$venv_python" -m pip install -qq --disable-pip-version-check --constraint scripts/constraints.txt "$@"
}

if ! "$venv_python" -c 'import torch' 2>/dev/null; then
    torch=$(grep '^torch==' scripts/constraints.txt)
    echo "install: $torch"
    # Without an NVIDIA GPU the build without CUDA libraries, where the package index has one.
    if command -v nvidia-smi >/dev/null || ! install "$torch+cpu" 2>/dev/null; then
        install "$torch"
    fi
fi
echo "install: loongforge[$extras]"
install --editable ".[$extras]"
"$venv_python" -m pip check
echo "$state" >"$stamp"
