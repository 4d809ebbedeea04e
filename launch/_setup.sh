# Sourced by the scripts beside it; not to be run by itself.
#
# set_up EXTRAS makes a virtual environment, installs megamoe with these optional dependencies into it, and activates it.
# On a machine with an NVIDIA GPU it takes the newest versions; elsewhere those of constraints/cpu.txt.
#
# Environment variables:
#   PYTHON                 interpreter that makes the environment (default: python3)
#   VENV                   folder of the environment (default: .venv in the repository's root)
#   SYSTEM_SITE_PACKAGES   1 = a new environment also sees the packages of PYTHON, for images that come with torch installed

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-$REPOSITORY/.venv}"

has_gpu() {
    [[ "$(nvidia-smi --list-gpus 2>/dev/null || true)" == GPU\ * ]]
}

set_up() {
    local extras="$1"
    if [[ ! -x "$VENV/bin/python" ]]; then
        if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "error: '$PYTHON' must be Python 3.10 or newer ($("$PYTHON" --version 2>&1 || true)):" \
                "install one and name it, as in PYTHON=python3.11 $0" >&2
            exit 1
        fi
        echo "making the virtual environment $VENV"
        local options=()
        if [[ "${SYSTEM_SITE_PACKAGES:-0}" == 1 ]]; then
            options+=(--system-site-packages)
        fi
        # ${a[@]+...}: an empty array counts as unset before bash 4.4.
        if ! "$PYTHON" -m venv "${options[@]+"${options[@]}"}" "$VENV"; then
            rm -rf "$VENV"
            echo "error: '$PYTHON -m venv' failed: install the venv module (python3-venv on Debian and Ubuntu)" >&2
            exit 1
        fi
    fi
    VENV="$(cd "$VENV" && pwd)"
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
    cd "$REPOSITORY"
    local constraints=()
    if ! has_gpu; then
        constraints+=(--constraint "$REPOSITORY/constraints/cpu.txt")
    fi
    echo "installing megamoe[$extras]"
    python -m pip install --quiet --disable-pip-version-check "${constraints[@]+"${constraints[@]}"}" --editable ".[$extras]"
}

# Number of processes that quickstart trains with: one per GPU, at most 8; two on a machine without.
default_processes() {
    local gpus=0
    if has_gpu; then
        gpus="$(nvidia-smi --list-gpus | grep -c '^GPU ')"
    fi
    if ((gpus > 8)); then gpus=8; fi
    if ((gpus > 0)); then echo "$gpus"; else echo 2; fi
}

# CPU threads for each of so many processes. torchrun would otherwise set 1 and warn about it.
threads_for() {
    local threads=$(($(python -c 'import os; print(len(os.sched_getaffinity(0)))') / $1))
    echo $((threads > 0 ? threads : 1))
}
