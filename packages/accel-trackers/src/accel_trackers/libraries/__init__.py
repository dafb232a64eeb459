"""One module for the tracker of each library."""
