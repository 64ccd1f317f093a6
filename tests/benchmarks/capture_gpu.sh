#!/bin/bash
# Usage, on a machine with one GPU, in the repository root: bash tests/benchmarks/capture_gpu.sh KIT [ARGS of capture_gpu.py]
# KIT: a folder with SGLang's wheels and boot.sh (installs them into $SITE). Prints a table as it goes; about 8 minutes.
set -e
KIT=$1; shift
export SITE=${SITE:-$HOME/.sglang-site}
time bash "$KIT/boot.sh"
export PYTHONPATH=$SITE:$PWD PYTHONUNBUFFERED=1
exec python3 tests/benchmarks/capture_gpu.py --kit "$KIT" "$@" 2>&1
