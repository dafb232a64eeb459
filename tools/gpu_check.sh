#!/usr/bin/env bash
# What only a machine with an accelerator can show: the tests marked gpu (training and saving under every strategy,
# fp16 with sharding, streaming under every device map; transformers, bitsandbytes, peft, trl and diffusers on accel
# beside the reference, in the environment build/clients), once more under CUDA's sanitizer of streams; the example;
# bandwidths; and the GPU benchmarks. All of it runs, whatever fails; what failed is said at the end.
# Only files with such tests are collected: others may import what is not installed there. Warnings are no errors: torch
# warns on GPUs of what it calls prototypes (set_sync_debug_mode).
set -uo pipefail
cd "$(dirname "$0")/.."
read -ra python <<<"${PYTHON:-uv run python}"
failed=()

try() {
    printf '\n##### %s\n' "$*"
    "$@" || failed+=("$*")
}

"${python[@]}" -c 'import torch; assert torch.accelerator.is_available(), "there is no accelerator here"; print(torch.__version__, torch.accelerator.current_accelerator(), torch.accelerator.device_count())' || exit 1
mapfile -t files < <(grep -rlE --include='test_*.py' 'mark\.gpu\b' packages tests-integration | sort)
try "${python[@]}" -m pytest -q -W default -m gpu "${files[@]}"
if "${python[@]}" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # An access that no event orders after another one is an error there.
    mapfile -t ours < <(printf '%s\n' "${files[@]}" | grep -v '^tests-integration/clients/')
    try env TORCH_CUDA_SANITIZER=1 "${python[@]}" -m pytest -q -W default -m gpu "${ours[@]}"
fi
try "${python[@]}" packages/accel-suite/examples/digits.py
try "${python[@]}" -m accel_cli test
for benchmark in tools/benchmarks/*.py; do
    if grep -q -- '"--gpu"' "$benchmark"; then
        try "${python[@]}" "$benchmark" --gpu
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    printf '\n##### failed\n'
    printf '%s\n' "${failed[@]}"
    exit 1
fi
