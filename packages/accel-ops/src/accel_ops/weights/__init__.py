"""Weight files: their names, sizes, shards and aliases; reading and writing them."""
