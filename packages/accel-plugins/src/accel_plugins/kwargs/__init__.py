"""The documented dataclasses through which users configure what PyTorch and accel do for them."""
