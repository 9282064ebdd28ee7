"""A compiled pass for decoders of Llama's kind: packed weights, one parallel region per token, no Python inside."""
