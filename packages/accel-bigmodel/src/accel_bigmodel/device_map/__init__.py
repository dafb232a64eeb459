"""Device maps: plans as pure functions, in time linear in the model."""
