"""The types of the functions of `accel` and `accel.utils`; read by type checkers, never run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, assert_type

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from accel import DDPCommunicationHookType, debug_launcher, launch, notebook_launcher, synchronize_rng_states
from accel import utils as u
from accel.accelerator import Accelerator
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState, GradientState


def launchers(train: Callable[[int], str]) -> None:
    """Launchers return the results by rank."""
    assert_type(debug_launcher(train, (1,)), dict[int, Any])
    assert_type(notebook_launcher(train, (1,), num_processes=2), dict[int, Any])
    launch("train.py", ("--lr", 1), config={"num_processes": 2})
    assert_type(DDPCommunicationHookType("fp16"), DDPCommunicationHookType)
    notebook_launcher(train, num_processes="two")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def random_numbers(generator: torch.Generator) -> None:
    """Seeds and random states."""
    assert_type(u.set_seed(1, device_specific=True), None)
    assert_type(u.synchronize_rng_state("torch"), None)
    assert_type(synchronize_rng_states(["torch", u.RNGType.CUDA], generator), None)
    u.set_seed("one")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def data(tensor: Tensor, batch: dict[str, Tensor]) -> None:
    """Functions on nested data keep its type."""
    assert_type(u.slice_tensors(batch, slice(0, 2)), dict[str, Tensor])
    assert_type(u.pad_input_tensors(batch, 4, 2), dict[str, Tensor])
    assert_type(u.convert_to_fp32(batch), dict[str, Tensor])
    assert_type(u.broadcast_object_list([1, 2]), list[int])
    assert_type((u.find_batch_size(batch), u.ignorant_find_batch_size(batch)), tuple[int, int | None])
    assert_type(u.find_device(batch), torch.device | None)
    assert_type(u.copy_tensor_to_devices(tensor), Tensor)
    assert_type(u.is_namedtuple(batch), bool)
    assert_type(u.avg_losses_across_data_parallel_group([tensor]), Tensor)


def modules(model: nn.Linear) -> None:
    """Facts about modules, and modules that are changed in place."""
    assert_type(u.find_tied_parameters(model), list[list[str]])
    assert_type(u.retie_parameters(model, [["a", "b"]]), None)
    assert_type(u.named_module_tensors(model), Iterator[tuple[str, Tensor]])
    assert_type((u.has_compiled_regions(model), u.is_compiled_module(model)), tuple[bool, bool])
    assert_type((u.is_peft_model(model), u.model_has_dtensor(model)), tuple[bool, bool])
    assert_type((u.has_4bit_bnb_layers(model), u.has_ao_layers(model)), tuple[bool, bool])
    assert_type(u.has_transformer_engine_layers(model), bool)
    assert_type(u.compile_regions_deepspeed(model, mode="default"), nn.Linear)
    assert_type(u.compile_regions_fsdp2(model), nn.Linear)
    assert_type(u.get_module_children_bottom_up(model), list[nn.Module])
    assert_type(u.convert_model(model), dict[Tensor, Tensor])
    assert_type(u.convert_model_to_fp8_ao(model), None)
    assert_type(u.filter_first_and_last_linear_layers(model, "0"), bool)
    assert_type(u.get_model_tp_size(model), int | None)
    assert_type(u.get_pretty_name(model), str)
    assert_type(u.release_memory(model), list[None])
    assert_type(u.check_tied_parameters_in_config(model), bool)
    assert_type(u.check_tied_parameters_on_same_device([["a", "b"]], {"": 0}), None)


def weights(model: nn.Linear, tensor: Tensor, folder: Path) -> None:
    """Sizes, names and files of weights."""
    assert_type((u.dtype_byte_size(torch.bfloat16), u.convert_file_size_to_int("5GB")), tuple[float, int])
    assert_type(u.convert_bytes(2**20), str)
    assert_type(u.id_tensor_storage(tensor), tuple[torch.device, int, int])
    assert_type(u.clean_state_dict_for_safetensors(model.state_dict()), dict[str, Any])
    assert_type(u.save_offload_index(u.offload_weight(tensor, "weight", folder), folder), None)
    assert_type(u.merge_fsdp_weights(folder, folder / "merged"), None)
    u.dtype_byte_size("float32")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def machine() -> None:
    """Facts about the machine, its libraries and the environment."""
    assert_type(u.compare_versions("torch", ">=", "2.9"), bool)
    assert_type(u.is_torch_version(">=", "2.9"), bool)
    assert_type((u.is_bf16_available(), u.is_fp16_available(), u.is_fp8_available()), tuple[bool, bool, bool])
    assert_type((u.is_deepspeed_available(), u.is_rich_available()), tuple[bool, bool])
    assert_type((u.is_habana_gaudi1(), u.is_port_in_use(29500)), tuple[bool, bool])
    assert_type(u.check_cuda_p2p_ib_support(), bool)
    assert_type(u.check_os_kernel(), None)
    assert_type(
        (u.get_gpu_info(), u.get_current_device_type()), tuple[tuple[list[str], int], tuple[str, str]]
    )
    assert_type(u.are_libraries_initialized("torch"), list[str])
    assert_type((u.str_to_bool("yes"), u.get_int_from_env(["RANK"], 0)), tuple[int | bool, int])
    assert_type((u.parse_flag_from_env("A"), u.parse_choice_from_env("B")), tuple[bool, str])
    assert_type(u.convert_dict_to_env_variables({"A": 1}), list[str])
    with u.patch_environment(a=1) as nothing, u.clear_environment() as neither:
        assert_type((nothing, neither), tuple[None, None])
    assert_type(u.write_basic_config("bf16"), Path | Literal[False])


def decorators(work: Callable[[int], str]) -> None:
    """Decorators keep what they decorate."""
    assert_type(u.deepspeed_required(work), Callable[[int], str])
    assert_type(u.torchao_required(work), Callable[[int], str])
    assert_type(u.purge_accelerate_environment(work), Callable[[int], str])


def precision() -> None:
    """Autocast and loss scaling."""
    assert_type(u.get_mixed_precision_context_manager(native_amp=True), AbstractContextManager[Any])
    assert_type((u.get_grad_scaler(), u.get_fsdp2_grad_scaler()), tuple[GradScaler, GradScaler])


def engines(
    accelerator: Accelerator,
    plugin: FullyShardedDataParallelPlugin,
    model: nn.Linear,
    optimizer: Optimizer,
    folder: Path,
) -> None:
    """FSDP and DeepSpeed by hand."""
    assert_type(u.save_fsdp_model(plugin, accelerator, model, folder), None)
    assert_type(u.load_fsdp_model(plugin, accelerator, model, folder), None)
    assert_type(u.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder), None)
    assert_type(u.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder), None)
    assert_type(u.fsdp2_switch_optimizer_parameters(optimizer, {}), None)
    assert_type(u.fsdp2_canonicalize_names({"a": 1}), dict[str, Any])
    assert_type(u.enable_fsdp_ram_efficient_loading(), None)
    assert_type(u.disable_fsdp_ram_efficient_loading(), None)
    assert_type(u.get_active_deepspeed_plugin(accelerator.state), DeepSpeedPlugin)
    assert_type(u.map_pytorch_optim_to_deepspeed(optimizer), Optimizer)
    with u.GatheredParameters(model.parameters(), modifier_rank=0) as nothing:
        assert_type(nothing, None)


def commands(arguments: Namespace) -> None:
    """Command lines for programs that start processes themselves."""
    assert_type(u.prepare_simple_launcher_cmd_env(arguments), tuple[list[str], dict[str, str]])
    assert_type(u.prepare_deepspeed_cmd_env(arguments), tuple[list[str], dict[str, str]])
    assert_type(u.prepare_multi_gpu_env(arguments), dict[str, str])
    assert_type(u.prepare_tpu(arguments, {}), tuple[Namespace, dict[str, str]])
    assert_type(u.install_xla(), None)


def state(
    accelerator: Accelerator,
    shared: AcceleratorState,
    gradients: GradientState,
    loader: DataLoader[Tensor],
    model: nn.Linear,
) -> None:
    """What the accelerator and the shared states hold."""
    assert_type(shared.get_deepspeed_plugin("student"), Any)
    assert_type(gradients.active_dataloader, Any | None)
    assert_type(gradients.dataloader_references, list[Any])
    trackers = accelerator.trackers
    assert_type(trackers[0].name, str)
    assert_type(accelerator.deepspeed_ulysses_dl_adapter(loader, model), Any)
