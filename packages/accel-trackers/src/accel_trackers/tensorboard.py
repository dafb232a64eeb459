"""TensorBoard: event files in the logging directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from accel_trackers.general import GeneralTracker, Images, import_vendor, on_main_process
from accel_trackers.values import named_images, split, to_flat, to_plain

# Two brands of the same writer; PyTorch's needs the `tensorboard` package.
_WRITERS = {True: "torch.utils.tensorboard", False: "tensorboardX"}


class TensorBoardTracker(GeneralTracker):
    """Write event files to `<logging_dir>/<run_name>`, within ten seconds; a run resumes in the same folder.

    Args:
        run_name: Name of the run, a folder.
        logging_dir: Directory of all runs.
        **kwargs: More arguments of `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    resumes_with = ("logging_dir", "", {})

    @on_main_process
    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = str(Path(logging_dir) / run_name)
        module = _WRITERS[find_spec("tensorboard") is not None]
        self._summary: Any = import_vendor(self.name, f"{module}.summary")
        self.writer: Any = import_vendor(self.name, module).SummaryWriter(self.logging_dir, **kwargs)

    tracker = property(attrgetter("writer"))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters for the dashboard HParams, and in `<time>/hparams.yml`.

        For the dashboard, nested ones are flattened, and `None` is a text.
        """
        flat = {name: "None" if value is None else value for name, value in to_flat(values).items()}
        for summary in self._summary.hparams(flat, {}):
            self.writer.file_writer.add_summary(summary)
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir()
        text = json.dumps(to_plain(values), indent=2)  # which is YAML
        (folder / "hparams.yml").write_text(text + "\n", encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, texts as texts, and dictionaries of numbers into one chart.

        Tensors with several elements become histograms.
        """
        groups = {name: value for name, value in values.items() if isinstance(value, Mapping)}
        ungrouped = {name: value for name, value in values.items() if name not in groups}
        numbers, texts, vectors = split(self.name, ungrouped)
        for name, group in groups.items():
            in_chart, more_texts, more_vectors = split(self.name, {name: group})
            lines = {key.removeprefix(f"{name}."): number for key, number in in_chart.items()}
            self.writer.add_scalars(name, lines, global_step=step, **kwargs)
            texts |= more_texts
            vectors |= more_vectors
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, global_step=step, **kwargs)
        for name, text in texts.items():
            self.writer.add_text(name, text, global_step=step, **kwargs)
        self._log_vectors(vectors, step)

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        for name, image in named_images(images):
            self.writer.add_image(name, image, global_step=step, dataformats="HWC", **options)

    def _log_histograms(self, values: Mapping[str, Any], step: int | None, options: dict[str, Any]) -> None:
        for name, value in values.items():
            self.writer.add_histogram(name, value, global_step=step, **options)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        for name, text in texts.items():
            self.writer.add_text(name, text, global_step=step, **options)

    @on_main_process
    def flush(self) -> None:
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        self.writer.close()
