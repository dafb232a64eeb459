"""N-d parallelism: the axes of the device mesh, and what tensor and context parallelism do."""
