"""`prepare` in steps: sort the arguments, run the stages in order, return in the caller's order."""
