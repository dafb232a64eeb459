"""Memory while a checkpoint is quantised: the quantised model and a little, never the float model."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")


@pytest.mark.thorough
@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")
def test_the_float_model_is_never_in_memory(tmp_path):
    pytest.importorskip("bitsandbytes")
    program = f"""
        import threading
        import time
        from pathlib import Path

        import torch
        from accel_bigmodel import init_empty_weights
        from accel_ops.weights.write import save_state_dict
        from accel_quant import BnbQuantizationConfig, load_and_quantize_model
        from torch import nn

        def own():
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

        def make():
            return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)], nn.Linear(8, 8))

        config = BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32")
        # What the library takes for itself comes first.
        load_and_quantize_model(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8)), config, device_map={{"": "cpu"}}
        )
        weights = {{f"{{i}}.weight": torch.randn(2048, 2048) for i in range(12)}}
        weights |= {{f"{{i}}.bias": torch.zeros(2048) for i in range(12)}}
        weights |= {{"12.weight": torch.zeros(8, 8), "12.bias": torch.zeros(8)}}
        save_state_dict(weights, {str(tmp_path)!r}, max_shard_size="50MB")
        total = sum(tensor.nbytes for tensor in weights.values())
        del weights
        from accel_state.platforms import trim_heap

        trim_heap()
        with init_empty_weights():
            model = make()
        start, peak, done = own(), [0], threading.Event()

        def watch():
            while not done.wait(0.005):
                peak.append(own() - start)

        thread = threading.Thread(target=watch)
        thread.start()
        model = load_and_quantize_model(model, config, {str(tmp_path)!r}, device_map={{"": "cpu"}})
        done.set()
        thread.join()
        packed = sum(parameter.nbytes for parameter in model.parameters())
        assert packed < total / 7, (packed, total)
        assert 1.2 * packed + (128 << 20) < total
        # Packed weights, their scales (an eighth), and what passes between two returns of freed memory.
        assert max(peak) < 1.2 * packed + (128 << 20), (max(peak), packed)
        assert own() - start < 1.2 * packed + (128 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
