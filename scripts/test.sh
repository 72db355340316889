#!/usr/bin/env bash
# usage: scripts/test.sh [PYTEST_ARGUMENTS]
# Installs everything and runs all tests.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh all,dev,docs,transformers
python=.venv/bin/python
# The hook is tested against later releases of megatron-core too, unpacked beside the installed one.
"$python" scripts/fetch_megatron_wheels.py
# The AMD kernels run on an emulator that decodes with LLVM 22; without it those tests skip and say what to install.
if ! command -v llvm-mc-22 >/dev/null || ! command -v ld.lld-22 >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq && apt-get install -yqq llvm-22 lld-22; } >/dev/null 2>&1 ||
            echo "test: llvm-22 and lld-22 could not be installed; the tests on the AMD emulator will skip" >&2
    fi
fi
# One process per core, each with one thread; tests of one file share a process and its fixtures.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -n auto --dist loadfile "$@"
