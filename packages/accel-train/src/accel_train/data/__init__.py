"""Data loading: the sharding of samples across ranks, and the loaders that yield them."""
