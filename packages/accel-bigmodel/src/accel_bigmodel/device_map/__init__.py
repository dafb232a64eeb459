"""Which layer lives where: plans as pure functions, in time linear in the model."""
