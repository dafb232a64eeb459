"""lm-evaluation-harness: it evaluates a small model on a task of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from small import text

from trainers.inputs import save_model, write_rows

if TYPE_CHECKING:
    from pathlib import Path


def evaluate(folder: Path) -> dict[str, Any]:
    """Choose among answers by their likelihoods."""
    rows = [
        {
            "question": text(index, 4 + index % 5),
            "choices": [text(3 * index + c, 3) for c in range(3)],
            "answer": index % 3,
        }
        for index in range(23)
    ]
    data = write_rows(folder / "data.jsonl", rows)
    task = {
        "task": "small",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    model = HFLM(pretrained=save_model(folder), device="cpu", dtype="float32", batch_size=4)
    result = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    if result is None:  # on all ranks but the main one
        return {}
    samples = sorted(result["samples"]["small"], key=lambda sample: sample["doc_id"])
    return {
        "ranks": model.world_size,
        "results": {
            key: value for key, value in result["results"]["small"].items() if isinstance(value, float)
        },
        "likelihoods": [float(reply[0]) for sample in samples for reply in sample["filtered_resps"]],
    }
