"""Transport of shards as safetensors bytes, with or without rounding."""
