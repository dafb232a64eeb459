"""N-d parallelism: the axes along which ranks divide the work, and what tensor and context parallelism do."""
