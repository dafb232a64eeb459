"""`prepare` in steps: sort the arguments, run the stages in order, give back in the caller's order."""
