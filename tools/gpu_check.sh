#!/usr/bin/env bash
# What only a machine with an accelerator can tell: the tests marked gpu, the example, and the GPU benchmarks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-"uv run python"}
$python -c 'import torch; assert torch.accelerator.is_available(), "there is no accelerator here"; print(torch.__version__, torch.accelerator.current_accelerator(), torch.accelerator.device_count())'
$python -m pytest -q -m gpu packages tests-integration
$python packages/accel-suite/examples/digits.py
for benchmark in tools/benchmarks/*.py; do
    if grep -q -- '"--gpu"' "$benchmark"; then
        $python "$benchmark" --gpu
    fi
done
