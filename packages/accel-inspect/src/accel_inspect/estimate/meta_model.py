"""Create meta models from configurations or weight files, and compute their sizes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from accel_bigmodel.empty import init_empty_weights
from accel_bigmodel.sizes import class_names, compute_module_sizes, get_max_layer_size
from accel_bigmodel.sources import open_checkpoint
from accel_inspect.estimate.memory import DeviceShare, ModelSizes
from accel_plugins.optimizers.muon import Muon
from accel_plugins.parallelism.config import ParallelismConfig, TorchPipelineParallelConfig
from accel_plugins.parallelism.experts import experts_of
from accel_plugins.parallelism.tensor import ShardedExperts, plan_of
from accel_plugins.pipeline.stages import lay_out
from accel_state.errors import AccelError, MissingDependencyError, SettingsError
from accel_state.files import any_path
from accel_state.frozen import frozen
from accel_state.libraries import require
from accel_state.remote import RemotePath

CONFIG = "config.json"


class ModelNotFoundError(SettingsError, OSError):
    """A model is neither local nor on the hub, or the hub is unreachable. An OSError like the hub's."""


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
        return _model_of_weights(name)
    is_local = path.exists()
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise SettingsError(f"model {name!r}: no such file or folder.")
    if not is_local and library == "timm" and "/" not in name:
        return _timm(name, {})
    config = path / CONFIG if path.is_dir() else path if is_local else _config_on_hub(name)
    if config.suffix == ".json" and config.is_file() and not config.name.endswith(".index.json"):
        content = _read_config(config)
        if library is None and content.keys() & {"model_type", "auto_map"}:
            library = "transformers"
        elif library is None and content.keys() & {"pretrained_cfg", "num_features"}:
            library = "timm"
        if library is not None:
            if library == "timm":
                return _timm(name, content)
            source = name if trust_remote_code and not is_local else config
            return _transformers(name, source, content, trust_remote_code)
    reason = ""
    if is_local:
        try:
            return _model_of_weights(path)
        except (AccelError, OSError) as error:
            reason = f" ({error})"
    raise SettingsError(
        f"model {name!r}: found no configuration of transformers or timm, and no weight files{reason}. "
        "If there is a configuration, pass its library with --library_name."
    )


def _model_of_weights(path: str | Path) -> nn.Module:
    """Create modules on the meta device with the names and shapes of the tensors of weight files."""
    root = nn.Module()
    tensors = {name: entry for source in open_checkpoint(path) for name, entry in source.tensors.items()}
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
            f"no file or folder {name!r}; if it is a model on the hub, install accel-inspect[hub]"
        ) from None
    try:
        cached = hub.try_to_load_from_cache(name, CONFIG)
        if isinstance(cached, str):
            return Path(cached)
        if not hub.constants.HF_HUB_OFFLINE and not getproxies():
            # The hub's library would try for half a minute to connect.
            address = urlsplit(hub.constants.ENDPOINT)
            port = address.port or (80 if address.scheme == "http" else 443)
            socket.create_connection((address.hostname or "", port), timeout=5).close()
        return Path(hub.hf_hub_download(name, CONFIG))
    except (OSError, ValueError) as error:  # The hub's errors: not found, gated, no network, invalid id.
        cause = error.__cause__ or error  # older versions say why only there
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ModelNotFoundError(
            f"model {name!r} is not a local file and not in the hub's cache, and the hub does not "
            f"provide its {CONFIG} ({reason})."
        ) from None


def _transformers(name: str, source: str | Path, content: Mapping[str, Any], trust: bool) -> nn.Module:
    require("transformers", f"model {name!r}", install="accel-inspect[transformers]")
    if "auto_map" in content and not trust:
        raise SettingsError(
            f"model {name!r} contains custom code: add --trust_remote_code to run it on this machine."
        )
    transformers: Any = import_module("transformers")
    if isinstance(source, Path) and source.name == CONFIG:
        source = source.parent  # which may have custom code
    try:
        made = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust)
        named = next((getattr(transformers, name, None) for name in made.architectures or ()), None)
        with init_empty_weights():
            model = (
                named(made) if named else transformers.AutoModel.from_config(made, trust_remote_code=trust)
            )
    except Exception as error:  # noqa: BLE001 - constructors raise anything for values that do not fit
        raise SettingsError(f"model {name!r}: transformers rejects its configuration: {error}") from None
    model.tie_weights()
    return model


def _timm(name: str, content: Mapping[str, Any]) -> nn.Module:
    require("timm", f"model {name!r}", install="accel-inspect[timm]")
    timm: Any = import_module("timm")
    try:
        options = {key: content[key] for key in ("num_classes",) if key in content}
        options |= content.get("model_args") or {}
        with init_empty_weights():
            return timm.create_model(content.get("architecture", name), pretrained=False, **options)
    except Exception as error:  # noqa: BLE001 - constructors raise anything for values that do not fit
        raise SettingsError(f"model {name!r}: timm does not recognise it: {error}") from None


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
    sizes = compute_module_sizes(model, dtype=dtype)
    unsplit = sorted(class_names(getattr(model, "_no_split_modules", None)))
    largest, layers = get_max_layer_size(list(model.named_children()) or [("", model)], sizes, unsplit)
    return Weights(total=sizes[""], largest=largest, layers=tuple(layers))


def sizes_of(
    model: nn.Module,
    parameters: Iterable[Tensor] | None = None,
    count: Callable[[Tensor], int] = torch.numel,
) -> ModelSizes:
    """Count the elements of a model, or of some of its parameters and of the blocks that they make.

    Example:
        >>> sizes_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        ModelSizes(parameters=40, trainable=40, blocks=(), largest=16, buffers=0, matrices=32, matrix=16)
    """
    chosen = model.parameters() if parameters is None else parameters
    own = {id(parameter): parameter for parameter in chosen}
    trainable = [parameter for parameter in own.values() if parameter.requires_grad]
    groups = Muon(model).param_groups if trainable else ()  # its AdamW updates what is no matrix
    matrices = [
        p for group in groups if group["algorithm"] == "muon" for p in group["params"] if id(p) in own
    ]
    blocks = [[*block.parameters()] for block in _blocks_of(model)]
    return ModelSizes(
        parameters=sum(map(count, own.values())),
        trainable=sum(map(count, trainable)),
        blocks=tuple(sum(map(count, block)) for block in blocks if all(id(p) in own for p in block)),
        largest=max(map(count, trainable), default=0),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        matrices=sum(map(count, matrices)),
        # In a stack of matrices, each counts separately.
        matrix=max((parameter.shape[-2] * parameter.shape[-1] for parameter in matrices), default=0),
    )


def shares_of(model: nn.Module, config: ParallelismConfig) -> list[DeviceShare]:
    """Count the elements on a device of each pipeline stage along the axes of a configuration.

    Raises:
        SettingsError: The model cannot be sharded in this way.
    """
    sizes, ep = config.sizes, config.ep_size or 1
    shards = sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
    name = ", ".join(f"{axis} {size}" for axis, size in (sizes | {"ep": ep}).items() if size > 1)
    experts = experts_of(model) if config.ep_enabled else {}
    of_experts = {id(p) for module in experts.values() for p in module.parameters()}
    # 1. The elements of each parameter on a device that has its stage: its tensor-parallel part.
    own = {id(parameter): parameter.numel() for parameter in model.parameters()}
    for module, style in plan_of(model, experts).items() if sizes["tp"] > 1 else ():
        for leaf, parameter in model.get_submodule(module).named_parameters(recurse=False):
            if isinstance(style, (ColwiseParallel, ShardedExperts)) or (
                isinstance(style, RowwiseParallel) and leaf == "weight"
            ):
                own[id(parameter)] = -(-parameter.numel() // sizes["tp"])

    def count(parameter: Tensor) -> int:
        """Count the elements that a device computes with, without experts of other devices."""
        return own[id(parameter)] // (ep if id(parameter) in of_experts else 1)

    # 2. The parameters of each stage.
    stages = [[*model.parameters()]]
    if config.pp_enabled:
        layout = lay_out(model, config.pp_handler or TorchPipelineParallelConfig(), sizes["pp"])
        of_ranks = [{} for _ in range(sizes["pp"])]
        for index, module in enumerate(layout.names):
            of_ranks[layout.rank_of(index)].update(dict.fromkeys(model.get_submodule(module).parameters()))
        stages = [[*of_rank] for of_rank in of_ranks]
    return [
        DeviceShare(
            name=f"FSDP2, {name}" if shards > 1 else name,
            sizes=sizes_of(model, stage, count),
            shards=shards,
            experts=sum(own[id(p)] - count(p) for p in stage if id(p) in of_experts),
            sequence=sizes["cp"] * sizes["sp"],
        )
        for stage in stages
    ]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that FSDP gathers separately: `_no_split_modules`, or the items of lists."""
    unsplit = class_names(getattr(model, "_no_split_modules", None))
    blocks = [module for module in model.modules() if type(module).__name__ in unsplit]
    if not blocks:
        blocks = [item for module in model.modules() if _is_list(module) for item in module.children()]
    inner = {id(part) for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if id(block) not in inner]


def _is_list(module: nn.Module) -> bool:
    """Return whether a module is a list of layers; in models of weight files it has numbered children."""
    names = [name for name, _ in module.named_children()]
    if isinstance(module, nn.Sequential) or len(names) < 2:
        return False
    return isinstance(module, nn.ModuleList) or all(name.isdigit() for name in names)
