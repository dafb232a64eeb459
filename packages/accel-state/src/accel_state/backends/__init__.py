"""Collectives on single tensors, for one process and for `torch.distributed`."""
