"""Megatron's engine: runs forward and backward passes of a model by a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_plugins.megatron.families import ModelFamily
from accel_plugins.megatron.library import core, without_core_warnings
from accel_plugins.megatron.train_steps import IGNORED
from accel_state import hang_monitor
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_plugins.megatron.state import PlacedWeight
    from accel_plugins.megatron.strategy import MegatronStrategy


class MegatronEngine(nn.Module):
    """This rank's pipeline stages of a model that Megatron trains.

    Called with a batch by keyword, it returns the loss over all micro-batches and replicas, on every rank.

    Args:
        strategy: Has the plugin and the groups.
        source: The model of transformers; its parameters are on the meta device.
        family: The model's row; `None` with a `custom_model_provider_function`.
        optimizer: megatron-core's optimizer; `None` in evaluation.
        optimizer_names: Names of weights in each group of PyTorch's optimizer, in order.

    Attributes:
        source: The model of transformers that was prepared.
        outputs: The class of a call's result; `None` for a model without a row.
        positions: The maximum sequence length of models with position embeddings; else `None`.
        samples: Number of samples, over all replicas, in the present gradients.
        steps: Number of steps of the optimizer.
    """

    source: nn.Module

    def __init__(
        self,
        strategy: MegatronStrategy,
        source: nn.Module,
        chunks: Sequence[nn.Module],
        *,
        family: ModelFamily | None,
        placed: Sequence[PlacedWeight],
        step: Any,
        generate: Callable[..., Tensor],
        optimizer: Any = None,
        optimizer_names: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__()
        self.chunks: Any = nn.ModuleList(chunks)
        vars(self)["source"] = source  # not as a submodule
        self.family = family
        self.placed = placed
        self.groups, self.plugin = strategy.groups, strategy.plugin
        self.train_step_handler = step
        self._generate = generate
        self.optimizer = optimizer
        self.optimizer_names = optimizer_names
        self.transformer_config = core("utils").get_model_config(chunks[0])
        self.config = getattr(source, "config", None)
        self.outputs = self.positions = None
        self._logits: list[str] = []
        if family is not None:
            hint: Any = get_type_hints(type(source).forward)["return"]
            self.outputs = (get_args(hint) or (hint,))[-1]
            self._logits += [one.name for one in fields(self.outputs) if one.name.endswith("logits")]
            arguments = family.model_arguments(source)
            if arguments.get("position_embedding_type", "learned_absolute") == "learned_absolute":
                self.positions = arguments.get("max_sequence_length")
        self.samples = self.steps = 0
        self._is_reduced = False

    def forward(self, *args: Any, **batch: Any) -> Any:
        """Evaluate a batch."""
        return self.run(args, batch, forward_only=True)

    def megatron_generate(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        length_penalty: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Generate from prompts; all ranks of a replica call it with the same prompts.

        The full model of transformers is gathered on the device of every rank, and its `generate` is called.
        Decoding is greedy, unless one of `temperature`, `top_k` and `top_p` requests sampling.

        Args:
            inputs: Tokens of shape `[rows, width]`.
            attention_mask: Of the same shape, 0 for padding, which is on one side of each prompt. Prompts
                padded on the right are continued in place of their padding.
            max_length: Maximum number of tokens of a prompt and its continuation, padding included.
            max_new_tokens: Maximum number of tokens beyond `width`, instead.
            num_beams: Number of beams.
            temperature: Divides logits before sampling.
            top_k: Sample only from this number of most probable tokens.
            top_p: Sample only from the most probable tokens with this total probability.
            length_penalty: Power of the length by which scores of beams are divided; default 1.
            **kwargs: `random_seed` for sampling, `add_BOS`, whether to put the `bos_token_id` before every
                prompt, and further options of transformers' `generate`.

        Returns:
            Prompts and continuations of shape `[rows, longest]`, on every rank of the replica.

        Raises:
            UnsupportedError: The model does not generate text.
            ValueError: transformers refuses an option.
        """
        kwargs |= {"max_length": max_length, "max_new_tokens": max_new_tokens, "num_beams": num_beams}
        kwargs |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return self._generate(self, inputs, attention_mask, kwargs | {"length_penalty": length_penalty})

    def run(
        self,
        args: Sequence[Any],
        batch: Mapping[str, Any],
        *,
        forward_only: bool,
        accumulation: int = 1,
        sync: bool = True,
    ) -> Any:
        """Run the schedule over the micro-batches of a batch of tensors by name.

        `accumulation` batches make one optimizer step; after the last of them, with `sync`, gradients are
        reduced.
        """
        # 1. Check the batch, and prepare megatron-core's configuration for the schedule.
        parts = self._micro_batches(args, batch)
        if not forward_only:
            if self.optimizer is None:
                raise SettingsError("This model was prepared without an optimizer: prepare both in one call.")
            if accumulation > 1 and self.plugin.calculate_per_token_loss:
                raise SettingsError(
                    f"gradient_accumulation_steps={accumulation} with calculate_per_token_loss: the tokens "
                    "of a step are counted in one call of the model; use num_micro_batches instead."
                )
            if self._is_reduced:
                self.discard()
        config, reduces = self.transformer_config, sync and not forward_only
        # A global of megatron-core that selects the schedule; models of one process may differ in it.
        core("parallel_state").set_virtual_pipeline_model_parallel_world_size(
            config.virtual_pipeline_model_parallel_size
        )
        config.finalize_model_grads_func = core("distributed").finalize_model_grads if reduces else None
        config.grad_scale_func = None if self.optimizer is None else self.optimizer.scale_loss
        iterators = [iter(parts) for _ in self.chunks]
        rows, length = next(iter(self._sequences(parts[0]).values())).shape[:2]
        # 2. Run it.
        with ExitStack() as stack, torch.set_grad_enabled(not forward_only):
            stack.enter_context(without_core_warnings())
            stack.enter_context(hang_monitor.collective_scope("forward and backward"))
            for chunk in self.chunks if not (sync or forward_only) else ():
                stack.enter_context(chunk.no_sync())
            results = core("pipeline_parallel").get_forward_backward_func()(
                forward_step_func=partial(self._scaled_step, accumulation),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=[*self.chunks],
                num_microbatches=len(parts),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
            loss, logits = self._mean_results(results)
        self._is_reduced = reduces
        self.samples += 0 if forward_only else len(parts) * rows * self.groups.data
        if self.outputs is None:
            return (loss, *logits) if logits else loss
        return self.outputs(loss=loss, **dict(zip(self._logits, logits, strict=False)))

    def discard(self) -> None:
        """Zero gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.samples = 0
        self._is_reduced = False

    def _scaled_step(self, accumulation: int, data_iterator: Any, model: Any) -> tuple[Any, Any]:
        """Run the train step; divide losses by the number of batches per optimizer step."""
        output, loss_function = self.train_step_handler.forward_step(data_iterator, model)

        def scaled(*args: Any, **kwargs: Any) -> Any:
            loss, *details = loss_function(*args, **kwargs)
            if self.plugin.calculate_per_token_loss and len(details) == 1:
                raise SettingsError(
                    "MegatronLMPlugin(calculate_per_token_loss=True): the loss function returns a pair; "
                    "return the sum of the losses, the number of tokens and the dictionary, or leave it out."
                )
            return (loss / accumulation, *details)

        return output, scaled

    def _micro_batches(self, args: Sequence[Any], batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Check a batch, and cut it into micro-batches."""
        # 1. Check its form, its number of samples, and the lengths of its sequences.
        if args or not batch:
            raise SettingsError("Megatron's engine takes a batch by name: call model(**batch).")
        number, sequences = self.plugin.num_micro_batches or 1, self._sequences(batch)
        rows = len(next(iter(sequences.values()), ()))
        if rows % number or not rows:
            raise SettingsError(
                f"A batch of {rows} samples cannot be divided into num_micro_batches={number}: make the "
                "batch size a multiple of it, or leave out the last batch (drop_last=True)."
            )
        tensor, context = self.groups.tensor, self.groups.context
        size, what = (tensor if self.transformer_config.sequence_parallel else 1), f"tp_degree={tensor}"
        if context > 1:  # Each rank has two chunks, which sequence parallelism divides.
            size, what = 2 * context * size, f"twice context_parallel_size={context}"
        for name, tokens in sequences.items():
            length, problem = tokens.shape[1], None
            if length % size:
                problem = (
                    f"cannot be divided by {what}: pad them to a multiple of {size} (pad_to_multiple_of)"
                )
            if self.positions is not None and name in _SEQUENCES and length > self.positions:
                kind = type(self.source).__name__
                problem = f"are too long: {kind} has {self.positions} positions. Truncate them"
            if problem:
                raise SettingsError(f"Sequences of {length} tokens {problem}.")
        # 2. Check tokens against the vocabulary, without a device sync; the user's code may read any tensor.
        vocabulary: int = getattr(self.config, "vocab_size", None) or 0
        has_own_code = self.plugin.custom_get_batch_function or self.plugin.custom_train_step_class
        is_known = "input_ids" in batch and vocabulary and self.family and not has_own_code
        for name in (*_TOKENS, "labels") if is_known else ():
            tokens = batch.get(name)
            if tokens is None or tokens.ndim < 2 or tokens.is_floating_point():  # Labels may be of classes.
                continue
            ignored, text = ((tokens == IGNORED), f" (or {IGNORED})") if name == "labels" else (False, "")
            torch._assert_async(
                (((tokens >= 0) & (tokens < vocabulary)) | ignored).all(),
                f"{name} has tokens that the vocabulary, from 0 to {vocabulary - 1}{text}, does not have.",
            )
        # 3. Cut it.
        parts: list[dict[str, Any]] = [{} for _ in range(number)]
        for name, value in batch.items():
            is_cut = isinstance(value, Tensor) and value.ndim > 0
            each = value.split(rows // number) if is_cut else [value] * number
            for part, own in zip(parts, each, strict=False):
                part[name] = own
        return parts

    def _sequences(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the sequences of a batch: tensors by name, else all with two or more dims.

        Activations sent between pipeline stages have the length of the first one.
        """
        tensors = {
            name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 1
        }
        has_decoder = self.family is not None and self.family.kind == "t5"
        names = (*_SEQUENCES, "labels") if has_decoder else _SEQUENCES
        if named := {name: tensors[name] for name in names if name in tensors}:
            return named
        if self.groups.pipeline > 1 and len({tensor.shape[1] for tensor in tensors.values()}) > 1:
            widths = ", ".join(f"{name} of {tensor.shape[1]}" for name, tensor in tensors.items())
            raise SettingsError(
                f"The batch has {widths}, of which one is the length that pipeline stages expect: call it "
                "input_ids, and rename it by a custom_get_batch_function."
            )
        return tensors

    def _mean_results(self, results: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the mean loss over the micro-batches, and logits, from the last stage."""
        group = core("parallel_state").get_pipeline_model_parallel_group()
        source, device = self.groups.pipeline - 1, next(self.parameters()).device
        losses = [
            torch.stack([value.detach().float() for value in one.values() if value.ndim == 0]).sum()
            for one in results
        ]
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        if source > 0:
            dist.broadcast(loss, group_src=source, group=group)
        if not getattr(self.train_step_handler, "return_logits", False):
            return loss, []
        logits: list[Any] = []
        for name in _LOGITS[: len(self._logits) or 1]:
            parts = [result[name].detach() for result in results if name in result]
            logits.append(torch.cat(parts) if parts else None)
        if logits[0] is not None and logits[0].ndim > 2:
            logits[0] = logits[0][..., : getattr(self.config, "vocab_size", None)]
        if source > 0:  # Only the last stage knows their shapes.
            logits = [None if value is None else value.cpu() for value in logits]
            dist.broadcast_object_list(logits, group_src=source, group=group)
        return loss, [None if value is None else value.to(device) for value in logits]


_SEQUENCES = ("input_ids", "tokens", "text", "text_enc", "decoder_input_ids", "text_dec")
_TOKENS = ("input_ids", "decoder_input_ids")
_LOGITS = ("logits", "order logits")
"""Train steps' names of the logits of tokens or classes, and of sentence order."""
