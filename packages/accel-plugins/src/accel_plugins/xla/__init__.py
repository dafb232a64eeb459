"""Training on XLA devices, which record operations and execute them on request."""
