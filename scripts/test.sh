#!/usr/bin/env bash
# usage: scripts/test.sh [PYTEST_ARGUMENTS]
# Installs everything and runs all tests.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh all,dev
python=.venv/bin/python
# The hook is tested against later releases of megatron-core too, unpacked beside the installed one.
"$python" scripts/fetch_megatron_wheels.py
exec "$python" -m pytest "$@"
