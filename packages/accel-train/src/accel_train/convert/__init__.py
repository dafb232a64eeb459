"""Convert checkpoints between formats, with less memory than the model."""
