#!/usr/bin/env bash
# From a clean clone to a trained mixture-of-experts language model, in one command:
#   ./launch/quickstart.sh           sets up .venv, trains preset "tiny" for some minutes, draws plots, writes sample text
#   ./launch/quickstart.sh --smoke   the same with a few steps, to see that everything runs
#
# Trains on all GPUs (at most 8), or with 2 processes on the CPU. Results: runs/quickstart/. An earlier run there is removed.
# Set-up can be steered by the environment variables in launch/_setup.sh; on an image that comes with torch:
#   SYSTEM_SITE_PACKAGES=1 ./launch/quickstart.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

usage="usage: $0 [--smoke]"
train_options=()
sample_bytes=1000
while (($#)); do
    case "$1" in
    --smoke)
        train_options=(--steps 8 --warmup-steps 2 --log-every 2 --validate-every 4 --validation-windows 16 --checkpoint-every 4)
        sample_bytes=100
        ;;
    -h | --help)
        echo "$usage"
        exit 0
        ;;
    *)
        echo "error: unknown argument '$1'; $usage" >&2
        exit 2
        ;;
    esac
    shift
done

SECONDS=0
set_up plot
echo "set-up took $SECONDS s"

run_dir="$REPOSITORY/runs/quickstart"
rm -rf "$run_dir"
processes="$(default_processes)"
OMP_NUM_THREADS="$(threads_for "$processes")"
export OMP_NUM_THREADS

echo "training preset tiny with $processes processes into $run_dir"
python -m torch.distributed.run --standalone --nproc-per-node "$processes" launch/train.py \
    --preset tiny --run-dir "$run_dir" "${train_options[@]+"${train_options[@]}"}"

echo
echo "sample text:"
# One byte at a time through a small model gains nothing from threads.
OMP_NUM_THREADS=1 python launch/generate.py --run-dir "$run_dir" --prompt $'import os\n\n\ndef ' \
    --bytes "$sample_bytes" --output "$run_dir/sample.txt"

echo
echo "done in $SECONDS s; results in $run_dir: summary.json, metrics.jsonl, sample.txt, *.png, checkpoints/"
