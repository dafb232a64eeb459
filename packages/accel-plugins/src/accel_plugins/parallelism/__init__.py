"""N-d parallelism: the axes of the device mesh, tensor parallelism and context parallelism."""
