"""What runs around a module's forward: placement, offload, casting."""
