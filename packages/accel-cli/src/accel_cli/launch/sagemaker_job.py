"""Start a job of Amazon SageMaker. This is where its SDK is imported."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_cli.launch.exit_codes import run_program
from accel_state.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> None:
    """Make the estimator of what `run_sagemaker.job` has written in JSON, and let it run the job."""
    request = json.loads(arguments[0])
    try:
        estimators = load("sagemaker.huggingface")
    except ImportError:
        raise MissingDependencyError(
            "Amazon SageMaker is reached with its SDK: `pip install 'accel-cli[sagemaker]'`."
        ) from None
    estimators.HuggingFace(**request["estimator"]).fit(inputs=request["inputs"])


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
