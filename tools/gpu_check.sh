#!/usr/bin/env bash
# What only a machine with a GPU can show, in five steps of less than ten minutes each: see tools/gpu_check.py.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
