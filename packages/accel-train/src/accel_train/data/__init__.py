"""Data loading: which rank gets which samples, and the loaders that yield them."""
