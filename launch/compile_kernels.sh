#!/usr/bin/env bash
# Compiles every device kernel for Hopper with the oldest, the usual and the newest supported triton; no GPU needed:
#   ./launch/compile_kernels.sh            all three
#   ./launch/compile_kernels.sh 3.7.1      these versions
# Every form of a kernel with the first version, a part of them with the others.
# Prints the kernels that do not compile, spill or do not fit. The whole table of the environment's own triton:
#   python -m megamoe.kernels.offline
#
# Versions other than the environment's go into folders of their own, below $TRITON_VERSIONS (default: triton/ in the
# virtual environment), while the first one compiles.
# Set-up can be steered by the environment variables in launch/_setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

set_up dev
folder="${TRITON_VERSIONS:-$VENV/triton}"
if (($# == 0)); then
    set -- 3.6.0 3.7.1 3.9.0
fi
own="$(python -c 'from importlib.metadata import version; print(version("triton"))')"

install_others() {
    local version target
    for version in "$@"; do
        target="$folder/$version"
        if [[ "$version" != "$own" && ! -d "$target/triton-$version.dist-info" ]]; then
            echo "installing triton $version"
            rm -rf "$target"
            python -m pip install --quiet --disable-pip-version-check --no-deps --target "$target" "triton==$version"
        fi
    done
}

install_others "$@" &
installer=$!
failed=()
forms=()
for version in "$@"; do
    path="${PYTHONPATH:-}"
    if [[ "$version" != "$own" ]]; then
        if [[ -n "$installer" ]]; then
            wait "$installer"
            installer=
        fi
        path="$folder/$version${path:+:$path}"
    fi
    PYTHONPATH="$path" python -m megamoe.kernels.offline --failures "${forms[@]+"${forms[@]}"}" || failed+=("$version")
    forms=(--brief)
done
if ((${#failed[@]})); then
    echo "error: kernels failed with triton ${failed[*]}" >&2
    exit 1
fi
