#!/usr/bin/env bash
# Run the checks that need a GPU, in five steps of less than ten minutes each: see tools/gpu_check.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
