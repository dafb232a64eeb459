"""Start jobs on Amazon SageMaker; the only importer of its SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_cli.launch.hosts import read_lines
from accel_cli.launch.plan import LaunchPlan
from accel_cli.output import redact
from accel_state.environ import set_environment
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings import to_environ


def run(plan: LaunchPlan) -> int:
    """Start a job."""
    request = job_request(plan)
    set_environment(plan.environ)
    try:
        estimators = import_module("sagemaker.huggingface")
    except ImportError:
        raise MissingDependencyError(
            "Amazon SageMaker jobs need its SDK: `pip install 'accel-cli[sagemaker]'`."
        ) from None
    estimators.HuggingFace(**request["estimator"]).fit(inputs=request["inputs"])
    return 0


def show(plan: LaunchPlan) -> str:
    """Return the arguments of the estimator and the inputs, without secrets."""
    return f"sagemaker.huggingface.HuggingFace {json.dumps(redact('', job_request(plan)))}"


def job_request(plan: LaunchPlan) -> dict[str, Any]:
    """Return the arguments of the estimator, and the inputs of its `fit`."""
    if not Path(plan.script).is_file() or plan.launch.module or plan.launch.no_python:
        raise SettingsError(
            f"Amazon SageMaker runs a Python file, but {plan.script!r} is not one: pass the path of a script."
        )
    return {
        "estimator": estimator_arguments(plan),
        "inputs": inputs(plan.settings.sagemaker.sagemaker_inputs_file),
    }


def estimator_arguments(plan: LaunchPlan) -> dict[str, Any]:
    """Return the arguments of `sagemaker.huggingface.HuggingFace`."""
    cloud, launch = plan.settings.sagemaker, plan.launch
    script = Path(plan.script)
    arguments: dict[str, Any] = {
        "image_uri": cloud.image_uri,
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "role": cloud.iam_role_name,
        "transformers_version": cloud.transformers_version,
        "pytorch_version": cloud.pytorch_version,
        "py_version": cloud.py_version,
        "base_job_name": cloud.base_job_name,
        "instance_count": launch.num_machines,
        "instance_type": cloud.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTIONS.get(launch.distributed_type or "NO"),
        "hyperparameters": hyperparameters(plan.script_arguments),
        "environment": {"ACCELERATE_USE_SAGEMAKER": "true", **to_environ(plan.settings)},
        "metric_definitions": metrics(cloud.sagemaker_metrics_file),
    }
    for name, value in dict(cloud.additional_args or {}).items():
        known = arguments.get(name)
        arguments[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    return {name: value for name, value in arguments.items() if value is not None}


_DISTRIBUTIONS: Mapping[str, Mapping[str, Any]] = {
    "DATA_PARALLEL": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "MODEL_PARALLEL": {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {}}},
        "mpi": {"enabled": True, "processes_per_host": 8},
    },
}
"""The argument `distribution` of an estimator by value of `distributed_type`."""


def hyperparameters(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a script in SageMaker's form: a value for every flag."""
    values: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        name, equals, text = remaining.pop(0).partition("=")
        if not name.startswith("--"):
            raise SettingsError(
                f"Amazon SageMaker accepts only named arguments: {name!r} of the script is positional."
            )
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise SettingsError(
                    f"Amazon SageMaker passes a value to every flag, but {name!r} of the script has none: "
                    f"make the script accept `{name} True`."
                )
            text = remaining.pop(0)
        values[name.removeprefix("--")] = _parse_value(text)
    return values


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def inputs(file: str | None) -> dict[str, str] | None:
    """Return the inputs of the job: their locations by channel."""
    return dict(_read_rows(file, "channel name")) or None


def metrics(file: str | None) -> list[dict[str, str]] | None:
    """Return the metrics to read from the output of the job: a name and a regular expression each."""
    return [{"Name": name, "Regex": regex} for name, regex in _read_rows(file, "metric name")] or None


def _read_rows(file: str | None, first: str) -> list[tuple[str, str]]:
    """Read the two columns of a file, without its header."""
    if file is None:
        return []
    lines = read_lines(file, f"file of {first}s")
    rows = [tuple(line.split("\t")) for line in lines[1:] if line.strip()]
    if any(len(row) != 2 for row in rows):
        raise SettingsError(f"{file!r}: expected lines with a {first}, a tab, and its value.")
    return [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 2]
