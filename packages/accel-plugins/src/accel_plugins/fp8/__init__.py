"""FP8: what torchao, TransformerEngine and MS-AMP need to train within `Accelerator`."""
