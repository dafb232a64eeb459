"""The examples of single features run on two processes, and say what they should."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from accel_state.accelerator_state import AcceleratorState, GradientState
from harness import cases, chosen_params, distributed
from harness.cuda_names import cuda_answered_by_cpu
from harness.engines import deepspeed_process
from harness.programs import TORCHRUN, Program, run_programs

EXAMPLES = Path(__file__).resolve().parents[2] / "packages/accel-suite/examples/by_feature"
INFERENCE = EXAMPLES.with_name("inference")
GALLERY = EXAMPLES.parents[1] / "docs/examples"

# What the first process prints.
SAYS = {
    "automatic_gradient_accumulation": r"^4 steps of 4 micro-batches of 64\n$",
    "compile": r"epoch 0: loss [5]\.\d+ in .*epoch 2: loss [5]\.\d+ in [\d.]+ s\n$",
    "cross_validation": r"fold 0: 0.9.* of 152 right\n.*together: 0.9\d+ of 114 held-out samples right\n",
    "ddp_comm_hook": r"epoch 0: loss [12]\.\d+\n.*epoch 2: loss 0\.[3-9]\d+\n",
    "distributed_inference": r"'The cat sat on the mat.' is nearest to 'A feline rested upon the rug.'\n",
    "early_stopping": r"^stopped after [1-4]?\d\d steps\n$",
    "expert_parallel": (
        r"^each process keeps \d+% of [\d,]+ parameters\n"
        r"epoch 0: loss .*epoch 3: loss [0-3]\.\d+\n$"
    ),
    "fp8": r"^2 of 4 linear layers in FP8\nepoch 0: loss .*epoch 3: loss 0\.\d+\n$",
    "fsdp_with_peak_mem_tracking": r"^weights: 2.01 MiB; prepared: 1.00 MiB .*step: 4.02 MiB\n$",
    "gradient_accumulation": r"epoch 0: 15 steps of 57 .*epoch 3: 15 steps of 57 batches, loss 0\.\d+\n",
    "gradient_accumulation_for_autoregressive_models": (
        r"epoch 0: loss per byte [45]\.\d+\n"
        r".*epoch 2: loss per byte [23]\.\d+\n"
    ),
    "language_model": r"step 0: loss 5.\d\d, learning rate .*loss at the end 2.\d\d\n",
    "local_sgd": r"0.9\d+ of 1797 digits right\n",
    "long_context": r"epoch 0: loss [34]\.\d+\n.*epoch 4: loss [0-3]\.\d+\n$",
    "megatron_lm_gpt_pretraining": (
        r"^held-out loss (2\.\d+) after 40 steps\n"
        r"held-out loss \1 in transformers\n$"
    ),
    "memory": r"batches of 1024\n.*batches of \d+\ntrained with batches of 1\d\d\n",
    "multi_process_metrics": r"epoch 0: F1 0.\d+ over 357 samples\n.*epoch 3: F1 0.9\d+ over 357 samples\n",
    "packed_sft": r"epoch 0: loss per byte 4\.\d+ of 11790 .*epoch 2: loss per byte 2\.\d+ of 11790 bytes\n$",
    "pipeline_training": r"epoch 0: loss [34]\.\d+\n.*epoch 3: loss [0-3]\.\d+\n$",
    "profiler": r"Self CPU time total",
    "qlora": (
        r"^20,480 of 40,960 packed bytes on this process\n"
        r"loss [34]\.\d+\nloss ([34]\.\d+) after resuming, \1 without interruption\n"
        r"merged: logits differ by at most \de-0[4-9]\n$"
    ),
    "weights_out": r"^epoch 0: the engine has 1\d\d\d of 1797 right\n.*epoch 2: the engine has 1[5-7]\d\d of",
    "weight_sync": (
        r"^epoch 0: 19,220 bytes sent, the engine has 1\d\d\d of 1797 right\n"
        r".*epoch 3: [1-9],\d\d\d bytes sent, the engine has 1[5-7]\d\d of 1797 right\n$"
    ),
    "schedule_free": r"epoch 3: 3[2-5]\d of 357 right\n$",
}


def last_line(output):
    """The last line, with 0 for every number: what one process prints as well as two."""
    return re.sub(r"[\d.]+[mu]?", "0", output.strip().splitlines()[-1])


def on_the_page(name):
    """What the page of an example says that it prints."""
    return re.search(r" prints:\n\n```text\n(.*?)```", (GALLERY / f"{name}.md").read_text(), re.DOTALL)[1]


def run(name, *arguments, folder=EXAMPLES):
    """Run an example as a script; return what it printed."""
    said = io.StringIO()
    with redirect_stdout(said), patch.object(sys, "argv", [f"{name}.py", *arguments]):
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    return said.getvalue()


THOROUGH = {
    "expert_parallel",
    "gradient_accumulation_for_autoregressive_models",
    "language_model",
    "long_context",
    "pipeline_training",
    "weights_out",
}
"""What takes longest. With every commit, test_strategies.py trains the same by one script, and the tests of
accumulation and of the weights that an engine gets hold the numbers."""
POOLED = sorted(SAYS.keys() - {"compile", "megatron_lm_gpt_pretraining"})


@pytest.mark.parametrize("name", cases(POOLED, always={*POOLED} - THOROUGH))
@distributed(world_size=2)
def test_an_example_says_what_it_should(name, tmp_path):
    with chdir(tmp_path):
        said = run(name)
    if dist.get_rank() == 0:
        assert re.search(SAYS[name], said, re.DOTALL), said
        assert last_line(said) == last_line(on_the_page(name))
    if name == "profiler":
        for rank in range(2):
            assert json.loads((tmp_path / f"traces/profile_{rank}.json").read_text())["traceEvents"]


@distributed(world_size=2)
def test_generated_texts_come_in_the_order_of_the_prompts():
    said = run("distributed_generation", folder=INFERENCE)
    if dist.get_rank() == 0:
        sentence = "the quick brown fox jumps over the lazy dog. " * 2
        pairs = [(eval(a), eval(b)) for a, b in re.findall(r"^(.*) goes on (.*)$", said, re.MULTILINE)]
        assert [prompt for prompt, _ in pairs] == [
            *("the quick", "brown fox j", "over the la", "lazy dog. t", "fox jumps")
        ]
        assert all(prompt + written in sentence for prompt, written in pairs), said


@distributed(world_size=2)
def test_a_pipeline_gives_what_one_process_does():
    said = run("pipeline", folder=INFERENCE)
    assert said == ("" if dist.get_rank() == 0 else "(8, 12, 32), equal to one process: True\n")


@pytest.mark.thorough
@distributed(world_size=2)
def test_sequences_are_sharded_by_context_parallelism():
    said = run("long_context", "--axis", "cp")
    if dist.get_rank() == 0:
        assert re.search(SAYS["long_context"], said, re.DOTALL), said


def launch(name, *arguments, folder):
    """Launch an example that wants processes of its own; return what it printed."""
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2"]
    script = str(EXAMPLES.parent / f"{name}.py")
    done = subprocess.run(
        [*command, script, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_regions_are_compiled(tmp_path):  # in processes where warnings of the compiler are no errors
    said = launch("by_feature/compile", folder=tmp_path)
    assert re.search(SAYS["compile"], said, re.DOTALL), said
    assert last_line(said) == last_line(on_the_page("compile"))


SCRIPT = """
import sys
from pathlib import Path
from accel.state import AcceleratorState, GradientState
source, runs = Path({file!r}).read_text(), {runs!r}
sys.path.insert(0, str(Path({file!r}).parent))
for number, arguments in enumerate(runs, 1):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    sys.argv = [{file!r}, *arguments]
    text = source if number == len(runs) else source.replace("accelerator.end_training()", "")
    exec(compile(text, {file!r}, "exec"), {{"__name__": "__main__"}})
"""
FULL_SCRIPTS = {
    "nlp_example": ([()], r"epoch 2: accuracy (0\.9\d\d|1\.000)\n$"),
    "complete_nlp_example": (
        [("--checkpointing_steps", "40"), ("--resume_from_checkpoint",)],
        r"epoch 2: accuracy (0\.9\d\d|1\.000)\nresuming in epoch 3\n$",
    ),
    "cv_example": ([()], r"epoch 1: accuracy 0\.\d+ of 359 images\n$"),
}
"""The arguments of each run, and what the main process says at the end."""


@pytest.fixture(scope="module")
def full_scripts(request, tmp_path_factory):
    """What the main process of each script that is asked for printed."""
    programs = {
        name: Program(
            SCRIPT.format(file=str(EXAMPLES.parent / f"{name}.py"), runs=FULL_SCRIPTS[name][0]),
            variables={**TORCHRUN, "ACCELERATE_USE_CPU": "true"},
        )
        for name in dict.fromkeys(params["script"] for params in chosen_params(request) if "script" in params)
    }
    imports = ("accel", "transformers.models.bert.modeling_bert", "timm", "sklearn.datasets")
    ends = run_programs(programs, tmp_path_factory.mktemp("scripts"), imports)
    errors = [end.errors for ranks in ends.values() for end in ranks if end.code]
    assert not errors, errors[0]
    return {name: ranks[0].output for name, ranks in ends.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("script", FULL_SCRIPTS)
def test_a_full_script_learns_and_resumes(full_scripts, script):
    assert re.search(FULL_SCRIPTS[script][1], full_scripts[script]), full_scripts[script]


def test_a_model_larger_than_memory_generates_the_same(tmp_path):
    with chdir(tmp_path):
        said = run("big_model", folder=INFERENCE)
    assert re.search(
        r"modules on cpu.* modules on disk\n16 new tokens, equal to .* in memory: True\n$", said
    ), said


@distributed(world_size=2)
def test_training_goes_on_where_it_was_interrupted(tmp_path):
    with chdir(tmp_path):
        first = run("checkpointing")
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        second = run("checkpointing")
    if dist.get_rank() == 0:
        assert first == "done after 87 steps in this life\n"
        assert second == "resuming in epoch 3\ndone after 0 steps in this life\n"


@pytest.mark.thorough
@distributed(world_size=2)
def test_the_same_script_trains_by_megatron(tmp_path):
    variables = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"}
    with chdir(tmp_path), patch.dict(os.environ, variables), cuda_answered_by_cpu():
        said = run("megatron_lm_gpt_pretraining")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with chdir(tmp_path):
        plainly = run("megatron_lm_gpt_pretraining")
    assert said == plainly
    if dist.get_rank() == 0:
        assert re.search(SAYS["megatron_lm_gpt_pretraining"], said), said


@distributed(world_size=2)
def test_deepspeed_trains_as_its_configuration_says():
    name = "deepspeed_with_config_support"
    with deepspeed_process():
        said = run(name)
    if dist.get_rank() == 0:
        losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\d\.\d+)", said, re.MULTILINE)]
        assert len(losses) == 3
        assert losses[-1] < 0.7
        assert last_line(said) == last_line(on_the_page(name))


def test_every_example_is_run():
    # `lora` is in tests-integration/nightly/clients, `tracking` in nightly/examples
    others = ["checkpointing", "deepspeed_with_config_support", "lora", "tracking"]
    assert sorted([*SAYS, *others]) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
