"""Config files as records, for programs that read and write them themselves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_cli.config_file import read_config, write
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.labels import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_state.settings.file import FILE_NAMES, default_config_folder, parse_file
from accel_state.settings.file import default_config_file as _found_config_file

if TYPE_CHECKING:
    from typing import Self

_environ = read()

cache_dir = str(default_config_folder(_environ))
"""The folder of the default config file."""

default_yaml_config_file, default_json_config_file = (str(Path(cache_dir) / name) for name in FILE_NAMES)
"""Where the default config file is, in either format."""

default_config_file = str(_found_config_file(_environ) or default_yaml_config_file)
"""The default config file; the one to write if there is none."""


@dataclass
class BaseConfig:
    """What every config file says."""

    compute_environment: ComputeEnvironment | str
    distributed_type: DistributedType | SageMakerDistributedType | str
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        is_local = self.compute_environment == ComputeEnvironment.LOCAL_MACHINE
        known = DistributedType if is_local else SageMakerDistributedType
        self.distributed_type = known(self.distributed_type)
        parse_file(self.to_dict(), type(self).__name__)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of the file; `None` is left out."""
        content = dataclasses.asdict(self)
        content |= content.pop("further", {})
        return {
            key: value.value if isinstance(value, Enum) else value
            for key, value in content.items()
            if value is not None
        }

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the file as YAML.

        Raises:
            SettingsError: It cannot be written.
        """
        write(Path(yaml_file), self.to_dict())

    def to_json_file(self, json_file: str) -> None:
        """Write the file as JSON.

        Args:
            json_file: The file, with the suffix `.json`.

        Raises:
            SettingsError: It has another suffix, or cannot be written.
        """
        if Path(json_file).suffix != ".json":
            raise SettingsError(f"to_json_file({json_file!r}): the file's suffix has to be .json.")
        write(Path(json_file), self.to_dict())

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> Self:
        """Read a file.

        Raises:
            SettingsError: It cannot be read, or holds what cannot be used.
        """
        return cls(**_content(yaml_file or default_yaml_config_file, cls))

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> Self:
        """Read a file, as `from_yaml_file` does; its suffix says the format."""
        return cls(**_content(json_file or default_json_config_file, cls))


@dataclass
class ClusterConfig(BaseConfig):
    """The config file of machines of one's own; the fields are keys of the reference page of settings.

    Keys that only accel has are in `further`.

    Example:
        >>> config = ClusterConfig("LOCAL_MACHINE", "NO", "bf16", use_cpu=True, debug=False, num_processes=2)
        >>> config.to_dict()["num_processes"], config.distributed_type.value
        (2, 'NO')
    """

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None
    further: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class SageMakerConfig(BaseConfig):
    """The config file of jobs on Amazon SageMaker; the fields are keys of the reference page of settings."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str | None = None
    transformers_version: str | None = None
    py_version: str | None = None
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | None) -> ClusterConfig | SageMakerConfig:
    """Read a config file as a record.

    Raises:
        FileNotFoundError: There is none.
        SettingsError: It cannot be read, or holds what cannot be used.
    """
    path = config_file or default_config_file
    if not Path(path).expanduser().is_file():
        raise FileNotFoundError(
            f"there is no config file {str(path)!r}: name one that exists, or run `accel config`."
        )
    content = read_config(str(path), read()).content
    on_sagemaker = content.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER.value
    kind = SageMakerConfig if on_sagemaker else ClusterConfig
    return kind(**_content(str(path), kind))


_ALWAYS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
}


def _content(path: str, kind: type[BaseConfig]) -> dict[str, Any]:
    """The keys of a file, those that every file says included."""
    content = {**_ALWAYS, **read_config(path, read()).content}
    if isinstance(content["mixed_precision"], bool):  # YAML reads a bare `no` as false
        content["mixed_precision"] = "no"
    if isinstance(content["distributed_type"], bool):
        content["distributed_type"] = "NO"
    known = {one.name for one in dataclasses.fields(kind)}
    found = {key: value for key, value in content.items() if value is not None}
    own = {key: value for key, value in found.items() if key in known}
    further = {key: value for key, value in found.items() if key not in known}
    return {**own, "further": further} if "further" in known else own
