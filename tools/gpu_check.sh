#!/usr/bin/env bash
# What only a machine with an accelerator can show: the tests marked gpu (training and saving under every strategy,
# fp16 with sharding, streaming under every device map; transformers, bitsandbytes, peft, trl and diffusers on accel
# beside the reference, in the environment build/clients), once more under CUDA's sanitizer of streams; the example;
# bandwidths; and the GPU benchmarks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-"uv run python"}
$python -c 'import torch; assert torch.accelerator.is_available(), "there is no accelerator here"; print(torch.__version__, torch.accelerator.current_accelerator(), torch.accelerator.device_count())'
$python -m pytest -q -m gpu packages tests-integration
if $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # An access that no event orders after another one is an error there.
    TORCH_CUDA_SANITIZER=1 $python -m pytest -q -m gpu --ignore tests-integration/clients packages tests-integration
fi
$python packages/accel-suite/examples/digits.py
$python -m accel_cli test
for benchmark in tools/benchmarks/*.py; do
    if grep -q -- '"--gpu"' "$benchmark"; then
        $python "$benchmark" --gpu
    fi
done
