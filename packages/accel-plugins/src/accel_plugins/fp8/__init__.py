"""FP8: train with torchao, TransformerEngine and MS-AMP within `Accelerator`."""
