"""What a process group can do to one tensor, for every way of being several processes."""
