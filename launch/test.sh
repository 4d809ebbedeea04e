#!/usr/bin/env bash
# Sets up .venv and runs the tests. Arguments go to pytest:
#   ./launch/test.sh                     all tests, two at a time
#   ./launch/test.sh -n 0 tests/launch   other settings
# Set-up can be steered by the environment variables in launch/_setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up dev,plot,hf
# Two tests run at a time and many start processes of their own.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -m pytest -n 2 --timeout=300 "$@"
