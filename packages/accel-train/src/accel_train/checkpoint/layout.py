"""Every file name of a checkpoint; the manifest with the size and checksum of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

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
CUSTOM_NAME = "custom_checkpoint"
LOADER_STATE_NAME = "dl_state_dict"
POSITION_NAME = "data_position"
MANIFEST_NAME = "accel_manifest.json"
TRACKERS_NAME = "trackers.json"
COMMIT_NAME = ".accel-commit"
"""In a folder that is overwritten: a complete checkpoint whose files have yet to replace the old ones. On a
disk, a number follows."""
UPLOAD_NAME = ".accel-upload"
"""In a folder of an object store: what was uploaded of a checkpoint that is not complete yet."""
_SAVING = "saving-"
_DELETING = "deleting-"
_STALE = re.compile(rf"(\.(.+))?\.({_SAVING}|{_DELETING})[0-9a-f]+")
_NUMBERED = re.compile(r"checkpoint_(\d+)")
_OURS = re.compile(
    rf"""({SAFE_MODEL_NAME}(_\d+)?\{SAFETENSORS_SUFFIX}
    |({MODEL_NAME}|{FSDP_MODEL_NAME}|{OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME}|{LOADER_STATE_NAME})(_\d+)?\.bin
    |{re.escape(SCALER_NAME)}
    |{POSITION_NAME}_\d+\.bin
    |({RNG_STATE_NAME}|{CUSTOM_NAME})_\d+\.pkl
    |{re.escape(TRACKERS_NAME)}
    |{re.escape(MANIFEST_NAME)})""",
    re.VERBOSE,
)
_OUR_FOLDERS = re.compile(rf"({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})_\d+|{MODEL_NAME}(_\d+)?")
ENGINE_ROOT_FILES = frozenset({"latest", "zero_to_fp32.py", "zero_to_torch.py"})
"""The files that DeepSpeed writes next to the folders of its engines."""


def _indexed(stem: str, index: int, suffix: str = ".bin") -> str:
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


optimizer_name = partial(_indexed, OPTIMIZER_NAME)
"""The state of an optimizer by the order of preparation: `optimizer.bin`, `optimizer_1.bin`."""
engine_name = partial(_indexed, MODEL_NAME, suffix="")
"""The folder that DeepSpeed's engine writes: `pytorch_model`, `pytorch_model_1` and so on."""
fsdp_weights_name = partial(_indexed, FSDP_MODEL_NAME)
"""The weights of a sharded model in one file, which other libraries write: `pytorch_model_fsdp.bin`."""
scheduler_name = partial(_indexed, SCHEDULER_NAME)
"""The state of a scheduler, by the order of preparation: `scheduler.bin`, `scheduler_1.bin` and so on."""
sampler_name = partial(_indexed, SAMPLER_NAME)
"""A pickled sampler, which only other libraries write: `sampler.bin`, `sampler_1.bin` and so on."""
loader_state_name = partial(_indexed, LOADER_STATE_NAME)
"""The state of a torchdata loader: `dl_state_dict.bin`, `dl_state_dict_1.bin` and so on."""


def weights_name(index: int, *, safe: bool) -> str:
    """Return the name of the weights of a model, by the order of preparation.

    Example:
        >>> weights_name(0, safe=True), weights_name(1, safe=False)
        ('model.safetensors', 'pytorch_model_1.bin')
    """
    return _indexed(SAFE_MODEL_NAME if safe else MODEL_NAME, index, SAFETENSORS_SUFFIX if safe else ".bin")


def full_weights_names(index: int) -> tuple[str, str, str]:
    """Return the names that a file with all weights of a model may have; the last one is other libraries'.

    Example:
        >>> full_weights_names(0)
        ('model.safetensors', 'pytorch_model.bin', 'pytorch_model_fsdp.bin')
    """
    return weights_name(index, safe=True), weights_name(index, safe=False), fsdp_weights_name(index)


def sharded_model_name(index: int) -> str:
    """Return the folder with the shards of a model, by the order of preparation.

    Example:
        >>> sharded_model_name(0)
        'pytorch_model_fsdp_0'
    """
    return f"{FSDP_MODEL_NAME}_{index}"


def sharded_optimizer_name(index: int) -> str:
    """Return the folder with the shards of an optimizer: `optimizer_0`, `optimizer_1` and so on."""
    return f"{OPTIMIZER_NAME}_{index}"


def rng_name(rank: int) -> str:
    """Return the file with the RNG states of a rank."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def position_name(rank: int) -> str:
    """Return the file with the positions of a rank's data loaders."""
    return f"{POSITION_NAME}_{rank}.bin"


def custom_name(index: int) -> str:
    """Return the file of an object registered for checkpointing, by the order of registration."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file has a name of a checkpoint's: others may have such files, too.

    Example:
        >>> is_of_checkpoint("optimizer_1.bin"), is_of_checkpoint("tokenizer.json")
        (True, False)
    """
    return name in ENGINE_ROOT_FILES or _OURS.fullmatch(name) is not None


def is_folder_of_checkpoint(name: str) -> bool:
    """Return whether a folder has a name of a checkpoint's: others may have such folders, too.

    Example:
        >>> is_folder_of_checkpoint("optimizer_0"), is_folder_of_checkpoint("logs")
        (True, False)
    """
    return _OUR_FOLDERS.fullmatch(name) is not None


def numbered_folders(project_dir: AnyPath) -> AnyPath:
    """Return the folder of numbered checkpoints."""
    return project_dir / "checkpoints"


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


def staging_path(target: Path, nonce: str) -> Path:
    """Return the staging folder of a checkpoint whose folder does not exist yet."""
    return target.with_name(f".{target.name}.{_SAVING}{nonce}")


def staging_inside(target: Path, nonce: str) -> Path:
    """Return the staging folder of a checkpoint in an existing folder."""
    return target / f".{_SAVING}{nonce}"


def trash_path(target: Path, nonce: str) -> Path:
    """Return the path of a checkpoint while it is deleted."""
    return target.with_name(f".{target.name}.{_DELETING}{nonce}")


def target_of_trash(name: str) -> str | None:
    """Return the checkpoint to which a staging or trash folder belongs: `""` is its parent; else `None`.

    Example:
        >>> target_of_trash(".checkpoint_3.saving-12ab"), target_of_trash("checkpoint_3")
        ('checkpoint_3', None)
    """
    match = _STALE.fullmatch(name)
    return None if match is None else (match[2] or "")


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
    format: int = FORMAT

    def to_text(self) -> str:
        """Return the manifest as JSON.

        Example:
            >>> manifest = Manifest(world_size=2, step=0, files={"a": FileRecord(size=1, checksum="0f")})
            >>> Manifest.from_text(manifest.to_text(), "here") == manifest
            True
        """
        table = {
            "format": self.format,
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
                    world_size=_typed(table["world_size"], int),
                    step=_typed(table["step"], int),
                    iteration=None if table["iteration"] is None else _typed(table["iteration"], int),
                    files={
                        _relative(name): FileRecord(
                            size=_typed(row["size"], int), checksum=_typed(row["checksum"], str)
                        )
                        for name, row in table["files"].items()
                    },
                )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{str(where)!r} is damaged ({str(error)[:200]!r}), so this checkpoint cannot be "
                "verified. Load another one."
            ) from error
        raise CheckpointError(
            f"{str(where)!r} has format {version!r} with checksums {table.get('checksum')!r}; this "
            f"version reads format {FORMAT!r} with {CHECKSUM!r}. Load it with the version that saved it."
        )

    def complaints(self, sizes: Mapping[str, int]) -> list[str]:
        """Return one phrase for each file that is absent or has another size.

        Example:
            >>> Manifest(world_size=1, step=0, files={"a": FileRecord(size=1, checksum="")}).complaints({})
            ["'a' is absent"]
        """
        return [
            f"{name!r} is absent"
            if name not in sizes
            else f"{name!r} has {sizes[name]} bytes, not {row.size}"
            for name, row in self.files.items()
            if sizes.get(name) != row.size
        ]


def _relative(name: str) -> str:
    """Refuse a name that leads out of the folder: files are deleted and moved by the names of a manifest."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is outside the folder")
    return name


_Value = TypeVar("_Value")


def _typed(value: object, kind: type[_Value]) -> _Value:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def shares(files: Mapping[str, FileRecord], parts: int) -> list[list[str]]:
    """Split files across ranks, about equally many bytes for each.

    Example:
        >>> sizes = {"a": 5, "b": 3, "c": 1}
        >>> shares({name: FileRecord(size=size, checksum="") for name, size in sizes.items()}, 2)
        [['a'], ['b', 'c']]
    """
    assigned: list[tuple[int, list[str]]] = [(0, []) for _ in range(parts)]
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        least = min(range(parts), key=lambda part: assigned[part][0])
        total, names = assigned[least]
        assigned[least] = (total + files[name].size, [*names, name])
    return [names for _, names in assigned]
