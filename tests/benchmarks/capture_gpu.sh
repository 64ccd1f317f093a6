#!/bin/bash
# Usage, on a machine with one GPU, in the repository root: bash tests/benchmarks/capture_gpu.sh KIT [ARGS of capture_gpu.py]
# KIT: a folder with SGLang's wheels and a boot.sh that installs them into $SITE, or a .tar.xz of such a folder.
# Prints a table as it goes; under 8 minutes.
set -e
KIT=$1; shift
export SITE=${SITE:-$HOME/.sglang-site}
if [ -f "$KIT" ]; then
  mkdir -p /tmp/k2-kit && python3 -m tarfile -e "$KIT" /tmp/k2-kit && KIT=/tmp/k2-kit
fi
time bash "$KIT/boot.sh"
export PYTHONPATH=$SITE:$PWD PYTHONUNBUFFERED=1
exec python3 tests/benchmarks/capture_gpu.py --kit "$KIT" "$@" 2>&1
