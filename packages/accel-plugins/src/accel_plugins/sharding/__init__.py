"""Models of which every rank holds a part: giving them values, stepping and saving them."""
