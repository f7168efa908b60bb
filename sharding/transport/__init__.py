"""How shards travel: as bytes of a safetensors file, with numbers rounded or not."""
