"""Create meta models from configurations or weight files, and compute their sizes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from accel_bigmodel.empty import init_empty_weights
from accel_bigmodel.sizes import class_names, compute_module_sizes, get_max_layer_size
from accel_bigmodel.sources import open_checkpoint
from accel_inspect.estimate.memory import DeviceShare, ModelSizes
from accel_ops.weights.read import find_checkpoint_files
from accel_plugins.optimizers.muon import Muon
from accel_plugins.parallelism.config import ParallelismConfig, TorchPipelineParallelConfig
from accel_plugins.parallelism.experts import experts_of
from accel_plugins.parallelism.tensor import ShardedExperts, plan_of
from accel_plugins.pipeline.stages import lay_out
from accel_state.errors import AccelError, MissingDependencyError, SettingsError
from accel_state.files import any_path
from accel_state.frozen import frozen
from accel_state.labels import CustomDtype
from accel_state.libraries import is_timm_available, is_transformers_available
from accel_state.remote import RemotePath

if TYPE_CHECKING:
    from accel_bigmodel.sizes import ElementType


CONFIG = "config.json"


def meta_model(name: str, *, library: str | None = None, trust_remote_code: bool = False) -> nn.Module:
    """Create a meta model, or modules with the same tensors if there are only weight files.

    Args:
        name: A configuration file, a folder or file with weights (or its fsspec URL), or the id of a model on
            the hub.
        library: `"transformers"` or `"timm"`; None to detect it.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        SettingsError: The model does not exist, or has neither a configuration nor weight files.
        MissingDependencyError: The library that defines it is not installed.
    """
    path = any_path(name, "model")
    if isinstance(path, RemotePath):
        return meta_model_of_weights(name)
    if path.exists():
        return _from_path(path, library, trust_remote_code)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SettingsError(f"model {name!r}: no such file or folder.")
    if library == "timm" and "/" not in name:
        return _timm(name)
    return _from_path(_config_on_hub(name), library, trust_remote_code, name)


def _from_path(path: Path, library: str | None, trust: bool, name: str | None = None) -> nn.Module:
    config = path / CONFIG if path.is_dir() else path
    if config.suffix == ".json" and config.is_file() and not config.name.endswith(".index.json"):
        content = _read_config(config)
        kind = library
        if kind is None and ("model_type" in content or "auto_map" in content):
            kind = "transformers"
        elif kind is None and ("pretrained_cfg" in content or "num_features" in content):
            kind = "timm"
        if kind is not None:
            return _BUILDERS[kind](name or str(path), config, content, trust)
    if name is None and _has_weights(path):
        return meta_model_of_weights(path)
    raise SettingsError(
        f"model {name or str(path)!r}: found no configuration of transformers or timm, and no weight "
        "files. If there is a configuration, pass its library with --library_name."
    )


def _has_weights(path: Path) -> bool:
    try:
        return bool(find_checkpoint_files(path).files)
    except (AccelError, OSError):
        return False


def meta_model_of_weights(path: str | Path) -> nn.Module:
    """Create modules on the meta device with the names and shapes of the tensors of weight files.

    Args:
        path: A file, a folder of files, or its fsspec URL. For safetensors only the header is read.

    Example:
        >>> model = _tree({"layers.0.weight": ((2, 3), torch.float32)})
        >>> [name for name, _ in model.named_parameters()]
        ['layers.0.weight']
    """
    return _tree({name: entry for source in open_checkpoint(path) for name, entry in source.tensors.items()})


def _tree(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> nn.Module:
    root = nn.Module()
    for name, (shape, dtype) in tensors.items():
        *parents, leaf = name.split(".")
        module = root
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        empty = torch.empty(shape, dtype=dtype, device="meta")
        if dtype.is_floating_point:
            module.register_parameter(leaf, nn.Parameter(empty))
        else:
            module.register_buffer(leaf, empty)
    return root


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError(f"configuration {str(path)!r} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"configuration {str(path)!r} is not a JSON object.")
    return content


def _config_on_hub(name: str) -> Path:
    """Download the configuration of a model, or find it in the local cache."""
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError:
        raise MissingDependencyError(
            f"no file or folder {name!r}; if it is a model on the hub, install accel-cli[hub]"
        ) from None
    try:
        cached = hub.try_to_load_from_cache(name, CONFIG)
        if isinstance(cached, str):
            return Path(cached)
        if not hub.constants.HF_HUB_OFFLINE:
            _check_reachable(hub.constants.ENDPOINT)
        return Path(hub.hf_hub_download(name, CONFIG))
    except (OSError, ValueError) as error:  # The hub's errors: not found, gated, no network, invalid id.
        text = str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise ModelNotFoundError(
            f"model {name!r} is not a local file and not in the hub's cache, and the hub does not "
            f"provide its {CONFIG} ({reason})."
        ) from None


class ModelNotFoundError(SettingsError, OSError):
    """A model is neither local nor on the hub, or the hub is unreachable. An OSError like the hub's."""


_PORTS: Mapping[str, int] = {"http": 80, "https": 443}
_CONNECT_TIMEOUT = 5.0  # Seconds.


def _check_reachable(endpoint: str) -> None:
    """Fail immediately if the hub is unreachable; its library would retry for a minute.

    Raises:
        OSError: There is no connection to the hub.
    """
    address = urlsplit(endpoint)
    host = address.hostname or ""
    if getproxies() and not proxy_bypass(host):  # The proxy may reach the hub even if this machine cannot.
        return
    with socket.create_connection((host, address.port or _PORTS[address.scheme]), _CONNECT_TIMEOUT):
        pass


def _transformers(name: str, config: Path, content: Mapping[str, Any], trust: bool) -> nn.Module:
    if not is_transformers_available():
        raise MissingDependencyError(
            f"model {name!r} is defined by transformers, which is not installed: install "
            "accel-cli[transformers]"
        )
    if "auto_map" in content and not trust:
        raise SettingsError(
            f"model {name!r} contains custom code: add --trust_remote_code to run it on this machine."
        )
    transformers: Any = import_module("transformers")
    source = str(config)
    if trust:  # Its code is stored next to the configuration, or in its repository on the hub.
        source = name if not Path(name).exists() else str(config.parent if config.name == CONFIG else config)
    try:
        made = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust)
        with init_empty_weights():
            named = next((getattr(transformers, name, None) for name in made.architectures or ()), None)
            model = (
                named(made) if named else transformers.AutoModel.from_config(made, trust_remote_code=trust)
            )
    except (*_UNFIT, ImportError, OSError) as error:
        # Constructors raise all of these for a configuration that they do not support.
        raise SettingsError(f"model {name!r}: transformers rejects its configuration: {error}") from None
    model.tie_weights()
    return model


def _timm(name: str, config: Path | None = None, content: Any = None, trust: bool = False) -> nn.Module:
    del config, trust
    if not is_timm_available():
        raise MissingDependencyError(
            f"model {name!r} is defined by timm, which is not installed: install timm"
        )
    timm: Any = import_module("timm")
    content = content or {}
    try:
        options = {"num_classes": content["num_classes"]} if "num_classes" in content else {}
        options |= content.get("model_args") or {}
        with init_empty_weights():
            return timm.create_model(content.get("architecture", name), pretrained=False, **options)
    except _UNFIT as error:
        raise SettingsError(f"model {name!r}: timm does not recognise it: {error}") from None


_UNFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The exceptions of libraries for configurations with inconsistent values."""

_BUILDERS: Mapping[str, Callable[[str, Path, Mapping[str, Any], bool], nn.Module]] = {
    "transformers": _transformers,
    "timm": _timm,
}

DTYPES: Mapping[str, ElementType] = {
    "float32": "float32",
    "float16": "float16",
    "int8": "int8",
    "int4": CustomDtype.INT4,
}
"""The dtypes of `--dtypes`."""


@frozen
class Weights:
    """The size of a model in one dtype, in bytes."""

    total: int
    largest: int
    layers: tuple[str, ...]


def weights_in(model: nn.Module, dtype: str) -> Weights:
    """Compute the bytes of a model's weights.

    Example:
        >>> weights_in(nn.Sequential(nn.Linear(4, 4, bias=False)), "int4")
        Weights(total=8, largest=8, layers=('0',))
    """
    sizes = compute_module_sizes(model, dtype=DTYPES[dtype])
    unsplit = sorted(class_names(getattr(model, "_no_split_modules", None)))
    largest, layers = get_max_layer_size(list(model.named_children()) or [("", model)], sizes, unsplit)
    return Weights(total=sizes[""], largest=largest, layers=tuple(layers))


def sizes_of(model: nn.Module) -> ModelSizes:
    """Count a model's elements.

    Example:
        >>> sizes_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        ModelSizes(parameters=40, trainable=40, blocks=(), largest=16, buffers=0, matrices=32, matrix=16)
    """

    def count(parameters: Iterable[Tensor]) -> int:
        return sum(parameter.numel() for parameter in parameters)

    return _sizes(model, [*model.parameters()], blocks_of(model), _matrices_of(model), count)


def _sizes(
    model: nn.Module,
    parameters: Sequence[Tensor],
    blocks: Iterable[nn.Module],
    matrices: Sequence[Tensor],
    count: Callable[[Iterable[Tensor]], int],
) -> ModelSizes:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return ModelSizes(
        parameters=count(parameters),
        trainable=count(trainable),
        blocks=tuple(count(block.parameters()) for block in blocks),
        largest=max((count([parameter]) for parameter in trainable), default=0),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        matrices=count(matrices),
        # In a stack of matrices, each counts separately.
        matrix=max((parameter.shape[-2] * parameter.shape[-1] for parameter in matrices), default=0),
    )


def _matrices_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters that Muon (not AdamW) updates."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return []
    groups = Muon(model).param_groups
    return [p for group in groups if group["algorithm"] == "muon" for p in group["params"]]


def shares_of(model: nn.Module, config: ParallelismConfig) -> list[DeviceShare]:
    """Count the elements on a device of each pipeline stage along the axes of a configuration.

    Raises:
        SettingsError: The model cannot be sharded in this way.
    """
    sizes = config.sizes
    name = ", ".join(
        f"{axis} {size}" for axis, size in (sizes | {"ep": config.ep_size or 1}).items() if size > 1
    )
    shards = sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
    experts = experts_of(model) if config.ep_enabled else {}
    of_experts = {id(p) for module in experts.values() for p in module.parameters()}
    own = _tensor_parallel_elements(model, sizes["tp"], experts)
    matrices, blocks, stages = _matrices_of(model), blocks_of(model), [model.parameters()]
    if config.pp_enabled:
        layout = lay_out(model, config.pp_handler or TorchPipelineParallelConfig(), sizes["pp"])
        modules = [model.get_submodule(module) for module in layout.names]
        stages = [
            chain.from_iterable(
                module.parameters() for index, module in enumerate(modules) if layout.rank_of(index) == rank
            )
            for rank in range(sizes["pp"])
        ]

    def count(parameters: Iterable[Tensor]) -> int:
        """Count the elements that a device computes with, without experts of other devices."""
        return sum(own[id(p)] // (config.ep_size or 1 if id(p) in of_experts else 1) for p in parameters)

    shares: list[DeviceShare] = []
    for stage in stages:
        parameters = list({id(parameter): parameter for parameter in stage}.values())
        known = {id(parameter) for parameter in parameters}
        for_muon = [parameter for parameter in matrices if id(parameter) in known]
        in_stage = [block for block in blocks if all(id(p) in known for p in block.parameters())]
        shares.append(
            DeviceShare(
                name=f"FSDP2, {name}" if shards > 1 else name,
                sizes=_sizes(model, parameters, in_stage, for_muon, count),
                shards=shards,
                experts=sum(own[id(p)] - count([p]) for p in parameters if id(p) in of_experts),
                sequence=sizes["cp"] * sizes["sp"],
            )
        )
    return shares


def _tensor_parallel_elements(
    model: nn.Module, size: int, experts: Mapping[str, nn.Module]
) -> dict[int, int]:
    """Return the elements of each parameter, by its identity, on one of `size` tensor-parallel ranks."""
    elements = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for name, style in plan_of(model, experts).items() if size > 1 else ():
        for leaf, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if isinstance(style, (ColwiseParallel, ShardedExperts)) or (
                isinstance(style, RowwiseParallel) and leaf == "weight"
            ):
                elements[id(parameter)] = -(-parameter.numel() // size)
    return elements


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that FSDP gathers separately.

    Blocks are the modules of `_no_split_modules` if the model defines it, else the items of its lists.
    """
    unsplit = class_names(getattr(model, "_no_split_modules", None))
    named = [module for module in model.modules() if type(module).__name__ in unsplit]
    if named:
        return _outermost(named)
    lists = [module for module in model.modules() if _is_list(module)]
    return _outermost([item for module in lists for item in module.children()])


def _is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of layers; in models of weight files it has numbered children."""
    names = [name for name, _ in module.named_children()]
    if isinstance(module, nn.Sequential) or len(names) < 2:
        return False
    return isinstance(module, nn.ModuleList) or all(name.isdigit() for name in names)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not inside another one of them."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]
