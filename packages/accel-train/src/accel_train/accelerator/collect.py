"""Gather and reduce results of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from accel_ops import collect, pad
from accel_train.accelerator.facet import Facet
from accel_train.metrics import gather_real

if TYPE_CHECKING:
    from typing import Literal

T = TypeVar("T")


class CollectFacet(Facet):
    """Collectives over nested data."""

    __slots__ = ()

    def gather(self, tensor: T) -> T:
        """Concatenate tensors of all processes along their first dimension, on every process.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors; 0-d ones become one row each.
                First dimensions may differ between processes.

        Returns:
            The same structure, rows in the order of the processes.
        """
        return collect.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: T,
        use_gather_object: bool = False,
    ) -> T:
        """Gather what the processes computed for the batch that a prepared loader yielded last.

        Loaders fill up the last batches so that all processes have equally many samples; these repeated
        samples are cut off, so that over an epoch every sample of the data set comes exactly once. Processes
        that compute parts of the same layers have the same samples, and one of them counts. Of an incomplete
        last batch no more rows are kept than it has samples, whatever is given.

        Args:
            input_data: Tensors as for `gather`, with one row per sample of the batch; 0-d ones are gathered
                as they are. Or a list, or a plain tuple, of one object per sample; a named tuple, a tuple of
                containers and a list of tensors and other things are fields.
            use_gather_object: Gather as objects even if there are only tensors.

        Returns:
            Tensors gathered as by `gather`; or the objects of all processes in one list; of a single process
            the objects as they are.

        Raises:
            ValueError: There is padding in the batch, and `input_data` is neither tensors nor one object per
                sample.
            DistributedOperationException: That is so on another process, or the data does not fit together.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(5), batch_size=2))
            >>> torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
            tensor([0, 1, 2, 3, 4])
        """
        parts = self._parts
        sharding = parts.strategy.sharding
        return gather_real(
            input_data,
            parts.gradient_state.active_dataloader,
            as_objects=use_gather_object,
            repeats=sharding.repeats if sharding.num_shards < parts.process.num_processes else None,
        )

    def reduce(self, tensor: T, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> T:
        """Combine tensors of all processes, element by element, on every process.

        Args:
            tensor: A tensor or nested tensors, of the same shapes on all processes.
            reduction: `"sum"`, `"mean"`, or `"none"` for none.
            scale: What the result is multiplied with.
        """
        return collect.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self,
        tensor: T,
        dim: int = 0,
        pad_index: int = 0,
        pad_first: bool = False,
    ) -> T:
        """Make tensors of all processes equally long along a dimension.

        Args:
            tensor: A tensor or nested tensors.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Whether to pad at the beginning instead of the end.
        """
        return pad.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
