"""bitsandbytes."""
