# ruff: noqa: INP001 - a script
"""Write a page of the gallery for each example: what it does, its source, and what it prints in one process.

uv run python packages/accel-suite/docs/src/example_pages.py [NAME ...]
"""

import ast
import io
import os
import runpy
import sys
import tempfile
import warnings
from contextlib import chdir, redirect_stdout
from pathlib import Path

from accel.state import AcceleratorState, GradientState

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGES = Path(__file__).resolve().parents[1] / "examples"
TITLES = {
    "digits": "Handwritten digits",
    "nlp_example": "Fine-tuning BERT (nlp_example)",
    "complete_nlp_example": "Fine-tuning BERT, complete (complete_nlp_example)",
    "cv_example": "Fine-tuning an image model (cv_example)",
    "complete/image_classification": "Image classification, complete",
    "complete/text_classification": "Text classification, complete",
    "by_feature/automatic_gradient_accumulation": "Automatic gradient accumulation",
    "by_feature/checkpointing": "Checkpointing and resuming",
    "by_feature/compile": "Compiling a model",
    "by_feature/cross_validation": "Cross validation",
    "by_feature/ddp_comm_hook": "Communication hooks",
    "by_feature/deepspeed_with_config_support": "DeepSpeed with its own configuration",
    "by_feature/distributed_inference": "Sentence embeddings on several processes",
    "by_feature/early_stopping": "Early stopping",
    "by_feature/expert_parallel": "Experts on several processes",
    "by_feature/fp8": "Training in FP8",
    "by_feature/fsdp_with_peak_mem_tracking": "FSDP with its memory",
    "by_feature/gradient_accumulation": "Gradient accumulation by steps",
    "by_feature/gradient_accumulation_for_autoregressive_models": (
        "Gradient accumulation for autoregressive models"
    ),
    "by_feature/language_model": "A language model with a warm-up",
    "by_feature/lora": "LoRA with peft",
    "by_feature/local_sgd": "Local SGD",
    "by_feature/long_context": "Long sequences on several processes",
    "by_feature/megatron_lm_gpt_pretraining": "Pretraining GPT-2 with Megatron",
    "by_feature/memory": "A batch size that fits into memory",
    "by_feature/multi_process_metrics": "Metrics over all processes",
    "by_feature/packed_sft": "Packed fine-tuning with a budget of tokens",
    "by_feature/pipeline_training": "Training a pipeline of processes",
    "by_feature/profiler": "Profiling some steps",
    "by_feature/qlora": "QLoRA under FSDP2",
    "by_feature/schedule_free": "A schedule-free optimizer",
    "by_feature/tracking": "Tracking an experiment",
    "by_feature/weight_sync": "Weights that changed, for an inference engine",
    "by_feature/weights_out": "Weights for an inference engine",
    "inference/big_model": "Generating with a model larger than memory",
    "inference/distributed_generation": "Distributed generation",
    "inference/pipeline": "A pipeline of processes",
}
LAUNCHED = {  # needs more than one process: what it printed under `accel launch --cpu --num_processes 2`
    "by_feature/deepspeed_with_config_support": (
        "epoch 0: loss 2.124, gradient norm 0.61\n"
        "epoch 1: loss 1.276, gradient norm 0.50\n"
        "epoch 2: loss 0.609, gradient norm 0.38\n"
    ),
}


def output_of(script: Path) -> str:
    """Run a script as this process; return what it printed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    said, before = io.StringIO(), sys.argv
    sys.argv = [script.name]
    try:
        with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return said.getvalue()


def page_of(name: str, title: str) -> str:
    """The page of an example."""
    script = EXAMPLES / f"{name}.py"
    summary = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0]
    output = LAUNCHED.get(name) or output_of(script)
    how = "two processes on the CPU" if name in LAUNCHED else "one process on the CPU"
    source = f"```{{literalinclude}} ../../examples/{name}.py\n:language: python\n```"
    lines = "\n".join(line[:150].rstrip() for line in output.strip().splitlines())
    return f"# {title}\n\n{summary}\n\n{source}\n\nIn {how} it prints:\n\n```text\n{lines}\n```\n"


def main() -> None:
    """Write the pages that are named, or all."""
    warnings.simplefilter("ignore")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for name, title in TITLES.items():
        if not sys.argv[1:] or Path(name).name in sys.argv[1:]:
            page = page_of(name, title)
            (PAGES / f"{Path(name).name}.md").write_text(page)


if __name__ == "__main__":
    main()
