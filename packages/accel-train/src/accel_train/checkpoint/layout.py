"""Every file name of a checkpoint; the manifest with the size and checksum of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import PurePosixPath
from typing import Any

from accel_ops.weights.layout import MODEL_NAME, SAFE_MODEL_NAME, SAFETENSORS_SUFFIX
from accel_state.errors import CheckpointError
from accel_state.frozen import frozen
from accel_state.remote import AnyPath

FSDP_MODEL_NAME = f"{MODEL_NAME}_fsdp"
"""The folder or file of a model that FSDP shards, before its number."""
OPTIMIZER_NAME = "optimizer"
"""The stem of an optimizer's files."""
RNG_STATE_NAME = "random_states"
"""The stem of the random number states of a rank."""
SAMPLER_NAME = "sampler"
"""The stem of a sampler's files."""
SCALER_NAME = "scaler.pt"
"""The file of the loss scaler."""
SCHEDULER_NAME = "scheduler"
"""The stem of a scheduler's files."""
MANIFEST_NAME = "accel_manifest.json"
TRACKERS_NAME = "trackers.json"
COMMIT_NAME = ".accel-commit"
"""In a folder that is overwritten: a complete checkpoint whose files have yet to replace the old ones. A
number follows."""
UPLOAD_NAME = ".accel-upload"
"""In a folder of an object store: says that the checkpoint is not complete yet."""
MODEL_KEY = "model"
OPTIMIZER_KEY = "optimizer"
"""The only keys of the states in folders of shards."""
ENGINE_ROOT_FILES = frozenset({"latest", "zero_to_fp32.py", "zero_to_torch.py"})
"""The files that DeepSpeed writes next to the folders of its engines."""

_patterns = [re.escape(name) for name in (SCALER_NAME, TRACKERS_NAME, MANIFEST_NAME, *ENGINE_ROOT_FILES)]


def _row(stem: str, suffix: str = "", *, first: bool = True) -> Callable[[int], str]:
    """Add a row to the names of a checkpoint; return the name by number, which the first has if `first`."""
    _patterns.append(rf"{stem}{r'_[0-9]+' if first else r'(_[0-9]+)?'}{re.escape(suffix)}")
    return lambda number: f"{stem}_{number}{suffix}" if first or number else f"{stem}{suffix}"


# Of a model, by the order of preparation: its weights, as safetensors and as `torch.save` writes them, those
# that other libraries gather from shards, and the folders of its shards and of DeepSpeed's engine.
safe_weights_name = _row(SAFE_MODEL_NAME, SAFETENSORS_SUFFIX, first=False)
bin_weights_name = _row(MODEL_NAME, ".bin", first=False)
fsdp_weights_name = _row(FSDP_MODEL_NAME, ".bin", first=False)
sharded_model_name = _row(FSDP_MODEL_NAME)
engine_name = _row(MODEL_NAME, first=False)
# Of other objects, by the order of preparation or registration: `optimizer.bin`, `optimizer_1.bin` and so on.
# Samplers are pickled, and only by other libraries.
optimizer_name = _row(OPTIMIZER_NAME, ".bin", first=False)
sharded_optimizer_name = _row(OPTIMIZER_NAME)
scheduler_name = _row(SCHEDULER_NAME, ".bin", first=False)
sampler_name = _row(SAMPLER_NAME, ".bin", first=False)
loader_state_name = _row("dl_state_dict", ".bin", first=False)
custom_name = _row("custom_checkpoint", ".pkl")
# Of a rank: the states of its generators, and the positions of its loaders.
rng_name = _row(RNG_STATE_NAME, ".pkl")
position_name = _row("data_position", ".bin")

_OURS = re.compile("|".join(_patterns))
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file or folder has a name of a checkpoint's: others may have such names, too.

    Example:
        >>> is_of_checkpoint("optimizer_1.bin"), is_of_checkpoint("tokenizer.json")
        (True, False)
    """
    return _OURS.fullmatch(name) is not None


MODEL_NAMES = safe_weights_name, bin_weights_name, fsdp_weights_name, sharded_model_name


def full_weights_names(index: int) -> tuple[str, str, str]:
    """Return the names that a file with all weights of a model may have; the last one is other libraries'.

    Example:
        >>> full_weights_names(0)
        ('model.safetensors', 'pytorch_model.bin', 'pytorch_model_fsdp.bin')
    """
    return safe_weights_name(index), bin_weights_name(index), fsdp_weights_name(index)


def numbered_name(iteration: int) -> str:
    """Return the name of a numbered checkpoint.

    Example:
        >>> numbered_name(3)
        'checkpoint_3'
    """
    return f"checkpoint_{iteration}"


def iteration_of(name: str) -> int | None:
    """Return the number of a numbered checkpoint; `None` for other names.

    Example:
        >>> iteration_of("checkpoint_12"), iteration_of("checkpoint_best")
        (12, None)
    """
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


FORMAT = 1
CHECKSUM = "xxh3_64"


@frozen
class FileRecord:
    """The size of a file in bytes, and its XXH3 hash of 64 bits in hexadecimal digits."""

    size: int
    checksum: str


@frozen
class Manifest:
    """The files of a checkpoint, and facts about the run that saved it.

    Args:
        step: Micro-batches since the last optimizer step.
        files: Every file by its path inside the folder, with `/` between folders.
    """

    world_size: int
    step: int
    iteration: int | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict[str, FileRecord])

    def to_text(self) -> str:
        """Return the manifest as JSON.

        Example:
            >>> manifest = Manifest(world_size=2, step=0, files={"a": FileRecord(size=1, checksum="0f")})
            >>> Manifest.from_text(manifest.to_text(), "here") == manifest
            True
        """
        table = {
            "format": FORMAT,
            "world_size": self.world_size,
            "step": self.step,
            "iteration": self.iteration,
            "checksum": CHECKSUM,
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return json.dumps(table, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str | bytes, where: object) -> Manifest:
        """Read what `to_text` wrote.

        Raises:
            CheckpointError: The text is damaged, or of an unknown version.
        """
        try:
            table: dict[str, Any] = json.loads(text)
            version = table["format"]
            if version == FORMAT and table["checksum"] == CHECKSUM:
                return cls(
                    world_size=int(table["world_size"]),
                    step=int(table["step"]),
                    iteration=table["iteration"],
                    files={_relative(name): FileRecord(**row) for name, row in table["files"].items()},
                )
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(
                f"{str(where)!r} is damaged ({str(error)[:200]!r}), so this checkpoint cannot be "
                "verified. Load another one."
            ) from error
        raise CheckpointError(
            f"{str(where)!r} has format {version!r} with checksums {table.get('checksum')!r}; this "
            f"version reads format {FORMAT!r} with {CHECKSUM!r}. Load it with the version that saved it."
        )


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read the manifest of a checkpoint; `None` for one that another library wrote.

    Raises:
        CheckpointError: It is damaged, or of an unknown version.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return None
    return Manifest.from_text(text, path)


def listed_files(folder: AnyPath) -> set[str]:
    """Return the files that the manifest in a folder lists, if it is undamaged; others may be anybody's."""
    with suppress(CheckpointError):
        manifest = read_manifest(folder)
        return set() if manifest is None else set(manifest.files)
    return set()


def _relative(name: str) -> str:
    """Refuse a name that leads out of the folder: files are deleted and moved by the names of a manifest."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is outside the folder")
    return name
