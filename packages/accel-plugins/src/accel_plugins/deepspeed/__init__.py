"""What configures DeepSpeed, and what stands around its engine. The library is imported only when used."""
