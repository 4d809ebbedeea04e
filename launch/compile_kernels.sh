#!/usr/bin/env bash
# Compiles every device kernel for Hopper with the oldest, the usual and the newest supported triton; no GPU needed:
#   ./launch/compile_kernels.sh            all three
#   ./launch/compile_kernels.sh 3.7.1      these versions
# Every form of a kernel with the first version, a part of them with the others.
# Prints the kernels that do not compile, spill or do not fit. The whole table of the environment's own triton:
#   python -m megamoe.kernels.offline
#
# Each version goes into a folder of its own, below $TRITON_VERSIONS (default: triton/ in the virtual environment).
# Set-up can be steered by the environment variables in launch/_setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up dev
folder="${TRITON_VERSIONS:-$VENV/triton}"
if (($# == 0)); then
    set -- 3.6.0 3.7.1 3.9.0
fi
failed=()
forms=()
for version in "$@"; do
    target="$folder/$version"
    if [[ ! -d "$target/triton-$version.dist-info" ]]; then
        echo "installing triton $version"
        rm -rf "$target"
        python -m pip install --quiet --disable-pip-version-check --no-deps --target "$target" "triton==$version"
    fi
    PYTHONPATH="$target${PYTHONPATH:+:$PYTHONPATH}" python -m megamoe.kernels.offline --failures "${forms[@]}" \
        || failed+=("$version")
    forms=(--brief)
done
if ((${#failed[@]})); then
    echo "error: kernels failed with triton ${failed[*]}" >&2
    exit 1
fi
