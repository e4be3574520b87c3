#!/usr/bin/env bash
# Checks every kernel on a GPU machine and measures it: correctness against float32 on fresh random inputs, then speed.
# Needs no network and no installation: a Python with JAX (0.10.2 or newer, for CUDA), NumPy, jaxtyping and rich.
# Under 8 minutes; results in gpu_check.json (--json FILE). Exit code 1 when a kernel is wrong.
#   PYTHON=/path/to/python scripts/gpu_check.sh [--json FILE] [--seconds N] [--check 'figure >= value']
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 480 "${PYTHON:-python3}" -m jaxkv.evaluation.gpu_check "$@"
