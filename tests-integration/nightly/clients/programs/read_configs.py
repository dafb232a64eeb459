"""Read the config files of a folder as the reference's launcher does; print its complaints as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env, prepare_tpu

PARSER = launch_command_parser()


def complaints(file: Path) -> list[str]:
    """Return the error, warnings and output of reading a file and preparing the environment of workers."""
    # The number of threads has no key, and the launcher tells about every flag that it decides on a CPU.
    words = ["--config_file", str(file), "--num_cpu_threads_per_process", "1", "train.py"]
    said = io.StringIO()
    error = ""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(said):
        warnings.simplefilter("always")
        try:
            args, config, _ = _validate_launch_command(PARSER.parse_args(words))
            if args.tpu:
                prepare_tpu(args, {})
            elif args.multi_gpu or args.use_fsdp or args.use_megatron_lm:
                prepare_multi_gpu_env(args)
            elif config.compute_environment == "LOCAL_MACHINE" and not args.use_deepspeed:
                prepare_simple_launcher_cmd_env(args)
        except Exception as problem:  # noqa: BLE001 - whatever the reference says
            error = f"{type(problem).__name__}: {problem}"
    texts = [error, said.getvalue(), *(str(warning.message) for warning in caught)]
    return [text.replace(str(file), "FILE") for text in texts if text]


if __name__ == "__main__":
    print(json.dumps({file.name: complaints(file) for file in Path(sys.argv[1]).iterdir()}))
