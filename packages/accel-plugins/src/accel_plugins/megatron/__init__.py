"""What configures Megatron, and what stands around its engine. The library is imported only when used."""
