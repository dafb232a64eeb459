"""`MegatronLMPlugin`: Megatron's options, their valid values, and arguments of models and optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import unwrap
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from accel_plugins.kwargs import is_count, resolve_fields
from accel_plugins.megatron.families import FAMILIES, ModelFamily, find_family
from accel_plugins.megatron.library import EXTRA
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import require
from accel_state.settings.engines import MegatronSettings
from accel_state.settings.model import TITLES, Settings

if TYPE_CHECKING:
    from accel_plugins.megatron.data import MegatronLMDummyScheduler

Parser: TypeAlias = "Callable[[MegatronLMPlugin, nn.Module, Mapping[str, Any] | None], None]"

DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("tp_degree", "pp_degree", "context_parallel_size", "num_micro_batches"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("no_load_optim", "no_save_optim", "eod_mask_loss", "use_custom_fsdp"), False),
    **dict.fromkeys(("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"), False),
    **dict.fromkeys(("use_precision_aware_optimizer", "use_distributed_optimizer"), False),
    **dict.fromkeys(("calculate_per_token_loss", "sequence_parallelism", "recompute_activations"), False),
    "attention_backend": "auto",
    "attention_softmax_in_fp32": True,
    "gradient_clipping": 1.0,
}
"""Values of fields that neither an argument nor the environment sets."""


@dataclass
class MegatronLMPlugin:
    """Options of Megatron. Arguments take precedence over variables `MEGATRON_LM_*`, these over defaults.

    Args:
        tp_degree: Tensor-parallel size; default 1.
        pp_degree: Pipeline-parallel size; default 1.
        use_custom_fsdp: Not supported: must be false.
        overlap_cpu_optimizer_d2h_h2d: Whether an offloaded optimizer copies while it computes.
        no_load_optim: Whether `load_state` skips the optimizer.
        eod_mask_loss: Whether the loss ignores the ends of documents of indexed datasets.
        no_save_optim: Whether `save_state` omits the optimizer's state of each parameter.
        optimizer_cpu_offload: Whether optimizer state is kept, and the step computed, on the CPU: the full
            state, unless `other_megatron_args` has an `optimizer_offload_fraction`. Needs
            `use_precision_aware_optimizer`.
        use_precision_aware_optimizer: Whether the distributed optimizer may keep its state in 16 bits; needs
            TransformerEngine.
        decoder_last_pipeline_num_layers: Layers of the last pipeline stage; by default as many as the others
            have.
        recompute_granularity: `"full"` recomputes layers in the backward pass, `"selective"` only attention;
            by default neither.
        recompute_method: With `"full"`: `"uniform"` (default) recomputes all layers, `"block"` the first of
            each stage.
        recompute_num_layers: With `"full"`: layers per recompute unit, or recomputed layers; default 1.
        attention_backend: `"auto"` (default), `"flash"`, `"fused"`, `"unfused"` or `"local"`; true stands for
            the first and false for `"unfused"`.
        expert_model_parallel_size: Not supported: must be 1.
        context_parallel_size: Context-parallel size; default 1.
        attention_dropout: Dropout probability of attention weights; the model's own by default.
        hidden_dropout: Dropout probability of hidden states; the model's own by default.
        attention_softmax_in_fp32: Whether the softmax of attention computes in float32; default true.
        expert_tensor_parallel_size: Not supported: must be 1.
        calculate_per_token_loss: Whether the loss of a step is the mean over all its tokens, rather than over
            its micro-batches and ranks.
        use_rotary_position_embeddings: Whether positions are rotary; by default as in the model, and refused
            if it differs.
        num_micro_batches: Micro-batches of a step; default 1.
        gradient_clipping: The norm to which gradients are clipped in every step; 0 for none; default 1.
        sequence_parallelism: Whether activations outside of tensor-parallel layers are sharded along the
            sequence dim.
        recompute_activations: The same as `recompute_granularity="selective"`.
        use_distributed_optimizer: Whether optimizer state is sharded across data-parallel ranks.
        pipeline_model_parallel_split_rank: Not supported: must not be set.
        num_layers_per_virtual_pipeline_stage: Layers of each virtual stage of a rank, for the interleaved
            schedule; by default a rank has one stage.
        is_train_batch_min: Whether the micro-batch size is the smallest batch size of several loaders, else
            the largest.
        train_iters: Optimizer steps of the training, for `MegatronLMDummyScheduler`.
        train_samples: Samples of the training, instead of `train_iters`.
        weight_decay_incr_style: How weight decay grows: `"constant"`, `"linear"` or `"cosine"`.
        start_weight_decay: Weight decay at the start; the optimizer's by default.
        end_weight_decay: Weight decay at the end; the optimizer's by default.
        lr_decay_style: How the learning rate decays: `"linear"`, `"cosine"`, `"inverse-square-root"` or
            `"constant"`.
        lr_decay_iters: Steps in which it decays; `train_iters` by default.
        lr_decay_samples: Samples in which it decays; `train_samples` by default.
        lr_warmup_iters: Steps of the warm-up.
        lr_warmup_samples: Samples of the warm-up.
        lr_warmup_fraction: The warm-up as a fraction of the steps or samples of the decay.
        min_lr: Minimum learning rate.
        consumed_samples: Samples already consumed, for each loader of indexed data sets in the order of
            preparation.
        no_wd_decay_cond: Called as `f(name, parameter)`: whether a parameter has no weight decay; by default
            the groups of the optimizer decide.
        scale_lr_cond: Called as `f(name, parameter)`: whether `lr_mult` scales a parameter's learning rate.
        lr_mult: The factor for `scale_lr_cond`.
        megatron_dataset_flag: Whether loaders are of Megatron's indexed data sets.
        seq_length: Sequence length in tokens, of indexed data sets and in the arguments of train steps; by
            default the model's number of positions.
        encoder_seq_length: The same for the encoder of a T5.
        decoder_seq_length: The same for its decoder.
        tensorboard_dir: Not supported: must not be set.
        set_all_logging_options: Not supported: must be false.
        eval_iters: Steps of an evaluation, which set the length of its indexed data set.
        eval_interval: Training steps between two evaluations, likewise.
        return_logits: Whether the model returns logits in addition to the loss.
        custom_train_step_class: A subclass of `AbstractTrainStep` to use instead of the model's own.
        custom_train_step_kwargs: Arguments of its constructor.
        custom_model_provider_function: Called as `f(pre_process, post_process, add_encoder, add_decoder)`:
            builds the module of a pipeline stage.
        custom_prepare_model_function: Called with that module before it is wrapped; returns the one to use.
        custom_megatron_datasets_provider_function: Called with the numbers of samples to train, validate and
            test with: builds the three indexed data sets.
        custom_get_batch_function: Called with an iterator of batches: returns the next one.
        custom_loss_function: Called with the arguments of the loss function of `custom_train_step_class`.
        other_megatron_args: Further fields of megatron-core's configurations by name, such as
            `{"overlap_grad_reduce": True}`.

    Raises:
        SettingsError: Values are invalid, exclude each other or need others. The message lists all.
        UnsupportedError: A field is not supported. The message names an alternative.

    Example:
        >>> plugin = MegatronLMPlugin(tp_degree=2, recompute_activations=True)
        >>> plugin.tp_degree, plugin.recompute_granularity, plugin.gradient_clipping
        (2, 'selective', 1.0)
    """

    DDP_impl: ClassVar[str] = "torch"
    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: str | bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., bool] | None = None
    scale_lr_cond: Callable[..., bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        sources = resolve_fields(self, "megatron", DEFAULTS)
        if isinstance(self.attention_backend, bool):
            self.attention_backend = "auto" if self.attention_backend else "unfused"
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # 1. Refuse fields that are not supported, and values whose mistake megatron-core would not explain.
        for name, (default, instead) in UNSUPPORTED.items():
            if values[name] != default:
                raise UnsupportedError(f"{sources[name]} is not supported: {instead}.")
        wrong = {name: f"expected one of {row}" for name, row in _CHOICES.items() if values[name] not in row}
        for name in _COUNTS:
            if values[name] is not None and not is_count(values[name], least=1):
                wrong[name] = "expected a whole number above 0"
        problems = [f"{sources[name]}: {problem}" for name, problem in wrong.items()]
        for name, other in _ALTERNATIVES:
            if None not in {values[name], values[other]}:
                problems.append(
                    f"{sources[name]} and {sources[other]} exclude each other: remove one of them"
                )
        for name, other, least in _NEEDED:
            if values[name] and (values[other] or 0) < least:
                problems.append(f"{sources[name]} needs {other}={least}: add it, or leave it out")
        if problems:
            raise SettingsError("; ".join(problems) + ".")
        # 2. Set what depends on others, and Megatron's arguments.
        if self.recompute_activations:
            self.recompute_granularity = self.recompute_granularity or "selective"
        is_full = self.recompute_granularity == "full"
        self.recompute_method = self.recompute_method or "uniform" if is_full else None
        self.recompute_num_layers = self.recompute_num_layers or 1 if is_full else None
        values = {_RENAMED.get(name, name): getattr(self, name) for name in values}
        self.megatron_lm_default_args = values | (values.pop("other_megatron_args") or {})

    def to_settings(self, settings: Settings) -> Settings:
        """Return the settings with Megatron enabled.

        Raises:
            SettingsError: Another engine was also requested.
            MissingDependencyError: megatron-core is not installed.
        """
        for section in ("deepspeed", "fsdp", "parallelism"):
            if getattr(settings, section) is not None:
                raise SettingsError(
                    f"Megatron and {TITLES[section]} were both requested: use one of them. The sizes of "
                    "Megatron's groups are tp_degree, pp_degree, context_parallel_size of MegatronLMPlugin."
                )
        require("megatron_lm", "MegatronLMPlugin", install=EXTRA)
        return replace(settings, megatron=settings.megatron or MegatronSettings())

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision in `megatron_lm_default_args`.

        Args:
            mixed_precision: `"no"`, `"fp16"` or `"bf16"`.

        Raises:
            UnsupportedError: The engine does not support the precision.
        """
        if mixed_precision in {"bf16", "fp16"}:
            self.megatron_lm_default_args[mixed_precision] = True
        elif mixed_precision != "no":
            raise UnsupportedError(
                f"mixed_precision={mixed_precision!r} is not supported with Megatron: use 'bf16' or 'fp16'."
            )

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes in `megatron_lm_default_args`.

        Args:
            micro_batch_size: Samples of a micro-batch of one rank.
            dp_degree: Data-parallel size.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: Optimizer) -> None:
        """Set the optimizer and its hyperparameters in `megatron_lm_default_args`.

        Args:
            optimizer: `AdamW`, `Adam` or `SGD` of PyTorch.

        Raises:
            UnsupportedError: The optimizer is another one, or has options that Megatron's does not have.
        """
        self.megatron_lm_default_args |= optimizer_args(optimizer)

    def set_scheduler_args(self, scheduler: MegatronLMDummyScheduler) -> None:
        """Set the schedule in `megatron_lm_default_args`; call `set_training_args` first.

        Args:
            scheduler: Sets the number of steps, if the plugin does not.

        Raises:
            SettingsError: The length of the schedule is not known.
        """
        ranks = getattr(self, "data_parallel_size", 1)
        steps, samples = self.train_iters, self.train_samples
        if steps is None and samples is None:
            if scheduler.total_num_steps is None:
                raise SettingsError(
                    "MegatronLMDummyScheduler has no total_num_steps, and MegatronLMPlugin neither "
                    "train_iters nor train_samples: set one of them."
                )
            steps = scheduler.total_num_steps // ranks
        warmup_steps, warmup_samples = self.lr_warmup_iters, self.lr_warmup_samples
        if self.lr_warmup_fraction is None and warmup_steps is None and warmup_samples is None:
            warmup_steps = scheduler.warmup_num_steps // ranks
            warmup_samples = warmup_steps * getattr(self, "global_batch_size", 1)
        self.megatron_lm_default_args |= {
            "train_iters": steps,
            "train_samples": samples,
            "lr_warmup_iters": warmup_steps or 0,
            "lr_warmup_samples": warmup_samples or 0,
        }

    def set_network_size_args(self, model: Any, batch_data: Mapping[str, Any] | None = None) -> None:
        """Set the sizes of a model in `megatron_lm_default_args`.

        Args:
            model: A model of transformers.
            batch_data: A batch, whose sequence lengths are used unless the plugin sets them.

        Raises:
            SettingsError: The type of the model is unknown. The message explains how to add it.
        """
        config: Any = getattr(model, "config", None)
        model_type: Any = getattr(config, "model_type", None)
        families = FAMILIES.available()
        if model_type in _PARSERS:
            _PARSERS[model_type](self, model, batch_data)
            return
        if model_type not in families:
            raise SettingsError(
                f"{type(model).__name__} is of type {model_type!r}, which is not described to Megatron "
                f"(known: {', '.join(sorted({*_PARSERS, *families}))}): register a function with "
                f"@add_model_config_to_megatron_parser({model_type!r})."
            )
        # 1. Set the lengths of sequences: the plugin's, those of the batch, or the number of positions.
        family, batch, args = families[model_type], batch_data or {}, self.megatron_lm_default_args
        kind, sizes, arguments = family.kind, family.transformer_config(config), family.model_arguments(model)
        longest = (None if kind == "t5" else arguments.get("max_sequence_length")) or _ANY_LENGTH
        lengths = {"encoder_seq_length": "input_ids", "decoder_seq_length": "labels"}
        for name, key in (lengths if kind == "t5" else {"seq_length": "input_ids"}).items():
            args[name] = getattr(self, name) or (int(batch[key].shape[1]) if key in batch else longest)
            setattr(self, name, args[name])
        # 2. Set the sizes.
        class_name = type(model).__name__.lower()
        args |= {
            "model_type_name": kind,
            "num_layers": arguments.get("encoder_layers", sizes["num_layers"]),
            **{name: sizes[name] for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads")},
            "num_query_groups": sizes.get("num_query_groups", sizes["num_attention_heads"]),
            "max_position_embeddings": longest,
            "orig_vocab_size": config.vocab_size,
            "model_return_dict": bool(getattr(config, "return_dict", True)),
            "pretraining_flag": kind != "bert" or "pretraining" in class_name or "maskedlm" in class_name,
            "return_logits": self.return_logits,
            "bert_binary_head": "pretraining" in class_name,
            "num_labels": int(getattr(config, "num_labels", 2)),
            "decoder_start_token_id": getattr(config, "decoder_start_token_id", None) or 0,
            "pad_token_id": getattr(config, "pad_token_id", None) or 0,
        }

    def set_tensorboard_logging_options(self) -> None:
        """Raise an `UnsupportedError`, which names an alternative: trackers log a run."""
        raise UnsupportedError(f"set_tensorboard_logging_options() has no effect here: {_TRACKER}.")

    def other_args(self, config: type) -> dict[str, Any]:
        """Return the `other_megatron_args` that are fields of one of megatron-core's configurations.

        Args:
            config: The dataclass of the configuration.
        """
        names = {field.name for field in fields(config)}
        return {name: value for name, value in (self.other_megatron_args or {}).items() if name in names}


_RENAMED: Mapping[str, str] = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
"""Names of fields in `megatron_lm_default_args`, where they differ."""
_TRACKER = "use Accelerator(log_with='tensorboard', project_dir=…)"
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "use_custom_fsdp": (False, "use FullyShardedDataParallelPlugin(fsdp_version=2) in place of this plugin"),
    "expert_model_parallel_size": (1, "no supported model has experts: leave it out"),
    "expert_tensor_parallel_size": (1, "no supported model has experts: leave it out"),
    "pipeline_model_parallel_split_rank": (None, "an encoder and its decoder are one stage: leave it out"),
    "tensorboard_dir": (None, _TRACKER),
    "set_all_logging_options": (False, _TRACKER),
}
"""Fields that are refused unless they have this value, and what to use instead."""
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root"),
    "recompute_granularity": (None, "full", "selective"),
    "recompute_method": (None, "uniform", "block"),
}
_COUNTS = (
    *("tp_degree", "pp_degree", "context_parallel_size", "num_micro_batches", "recompute_num_layers"),
    *("decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage"),
    *("train_iters", "train_samples", "seq_length", "encoder_seq_length", "decoder_seq_length"),
)
_ALTERNATIVES = (
    *product(("train_iters", "lr_decay_iters", "lr_warmup_iters"), ("train_samples", "lr_decay_samples")),
    *product(("train_iters", "lr_decay_iters", "lr_warmup_fraction"), ("lr_warmup_samples",)),
    ("lr_warmup_iters", "lr_warmup_samples"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("num_layers_per_virtual_pipeline_stage", "decoder_last_pipeline_num_layers"),
)
"""Pairs of fields that set the same thing, or count in different units."""
_NEEDED = (
    ("num_layers_per_virtual_pipeline_stage", "pp_degree", 2),
    ("decoder_last_pipeline_num_layers", "pp_degree", 2),
    ("optimizer_cpu_offload", "use_precision_aware_optimizer", True),
)
"""Fields that another one must accompany, and its least value."""


def optimizer_args(optimizer: Optimizer) -> dict[str, Any]:
    """Convert an optimizer of PyTorch to Megatron's arguments.

    Example:
        >>> import torch
        >>> args = optimizer_args(AdamW(torch.nn.Linear(1, 1).parameters(), lr=0.1, weight_decay=0.02))
        >>> args["optimizer"], args["lr"], args["weight_decay"]
        ('adam', 0.1, 0.02)
    """
    name = type(optimizer).__name__
    advice = "Use torch.optim.AdamW, Adam or SGD."
    if not isinstance(optimizer, Adam | AdamW | SGD):  # Before torch 2.7 AdamW is not a subclass of Adam.
        raise UnsupportedError(f"{name} is not one of Megatron's optimizers. {advice}")
    step = unwrap(type(optimizer).step)  # torch wraps the method when the first instance is created.
    if not any(step is unwrap(kind.step) for kind in (Adam, AdamW, SGD)):
        raise UnsupportedError(f"{name} has its own step(), which Megatron would not call. {advice}")
    defaults = optimizer.defaults
    for option in ("amsgrad", "maximize", "nesterov"):
        if defaults.get(option):
            raise UnsupportedError(f"{name}({option}=True): Megatron's optimizer has no {option}. Remove it.")
    shared = {"lr": float(defaults["lr"]), "weight_decay": defaults["weight_decay"]}
    if isinstance(optimizer, SGD):
        return {"optimizer": "sgd", "sgd_momentum": defaults["momentum"], **shared}
    return {
        "optimizer": "adam",
        "adam_beta1": defaults["betas"][0],
        "adam_beta2": defaults["betas"][1],
        "adam_eps": defaults["eps"],
        "decoupled_weight_decay": isinstance(optimizer, AdamW)
        or defaults.get("decoupled_weight_decay", False),
        **shared,
    }


def scheduler_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of megatron-core's `OptimizerParamScheduler`, which counts in samples.

    One step of the optimizer is `step(global_batch_size)`.
    """
    unit, batch = ("iters", args["global_batch_size"]) if args["train_samples"] is None else ("samples", 1)
    total = args[f"train_{unit}"] * batch
    decay = (args[f"lr_decay_{unit}"] or args[f"train_{unit}"]) * batch
    warmup, fraction = args[f"lr_warmup_{unit}"] * batch, args["lr_warmup_fraction"]
    start, end = args["start_weight_decay"], args["end_weight_decay"]
    return {
        "init_lr": 0.0,
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "lr_warmup_steps": warmup if fraction is None else int(fraction * decay),
        "lr_decay_steps": decay,
        "lr_decay_style": args["lr_decay_style"],
        "start_wd": args["weight_decay"] if start is None else start,
        "end_wd": args["weight_decay"] if end is None else end,
        "wd_incr_steps": total,
        "wd_incr_style": args["weight_decay_incr_style"],
    }


_PARSERS: dict[str, Parser] = {}
_ANY_LENGTH = 1024
"""Sequence length of a model without a limit of positions, if no length is set."""


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Return a decorator that registers the description of a model type for Megatron.

    Args:
        model_type: As in `model.config.model_type`.

    Returns:
        A decorator of functions `f(megatron_lm_plugin, model, batch_data)` that set the sizes of the model in
        `megatron_lm_plugin.megatron_lm_default_args`.

    Example:
        >>> @add_model_config_to_megatron_parser("my_model")
        ... def describe(megatron_lm_plugin, model, batch_data):
        ...     megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.num_layers
    """

    def register(parser: Parser) -> Parser:
        _PARSERS[model_type] = parser
        return parser

    return register


def check_model(plugin: MegatronLMPlugin, model: Any) -> ModelFamily:
    """Find a model's family; refuse options that it does not have, and sizes that groups do not divide."""
    family, name = find_family(model), type(model).__name__
    family.check(model.config)
    sizes, arguments = family.transformer_config(model.config), family.model_arguments(model)
    # 1. Every weight has a row.
    names = (re.escape(name) for row in family.weights(model.config) for name in row.names)
    known = re.compile("|".join(name.replace(r"\{layer\}", r"\d+") for name in names))
    if missing := [name for name, _ in model.named_parameters() if not known.fullmatch(name)]:
        raise SettingsError(
            f"{name} has weights without a row in its family, which Megatron would not train or save: "
            f"{', '.join(missing)}. Add rows for them, or leave out what makes them."
        )
    # 2. The family has the options.
    is_decoder, rotary = family.kind == "gpt", plugin.use_rotary_position_embeddings
    is_rotary = arguments.get("position_embedding_type") in {"rope", "yarn", "mrope"}
    refused: dict[str, str] = {}
    if rotary not in {None, is_rotary}:
        refused["use_rotary_position_embeddings"] = "its configuration decides"
    if not is_decoder and plugin.context_parallel_size != 1:
        refused["context_parallel_size"] = "decoders only"
    if not is_decoder and plugin.attention_backend in {"flash", "fused"}:
        refused["attention_backend"] = "decoders only"
    if family.kind == "t5" and plugin.recompute_granularity:  # It loses gradients of relative positions.
        refused["recompute_granularity"] = "use smaller micro-batches"
    if refused:
        wrong = "; ".join(f"{key}={getattr(plugin, key)!r} ({reason})" for key, reason in refused.items())
        raise UnsupportedError(f"{family.name!r} does not have {wrong}: leave it out.")
    # 3. The sizes divide.
    tensor, stages = plugin.tp_degree or 1, plugin.pp_degree or 1
    heads, layers, width = sizes["num_attention_heads"], sizes["num_layers"], sizes["ffn_hidden_size"]
    groups = sizes.get("num_query_groups", heads)
    last, virtual = plugin.decoder_last_pipeline_num_layers, plugin.num_layers_per_virtual_pipeline_stage
    is_uneven = layers % (stages * (virtual or 1))
    if last is not None:
        is_uneven = layers - last < stages - 1 or (layers - last) % (stages - 1)
    options = (f", decoder_last_pipeline_num_layers={last}" if last else "") + (
        f", num_layers_per_virtual_pipeline_stage={virtual}" if virtual else ""
    )
    rows = {
        f"{heads} attention heads by tp_degree={tensor}": heads % tensor,
        f"{groups} key-value heads by tp_degree={tensor}": groups % tensor and tensor % groups,
        f"{width} features of the intermediate layer by tp_degree={tensor}": width % tensor,
        f"an encoder and a decoder by pp_degree={stages} (use tp_degree)": stages > 1
        and "encoder_layers" in arguments,
        f"{layers} layers by pp_degree={stages}{options}": is_uneven,
    }
    if problems := [text for text, is_problem in rows.items() if is_problem]:
        raise SettingsError(f"{name} cannot be divided in this way: {'; '.join(problems)}.")
    return family
