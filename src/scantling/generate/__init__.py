"""Prompt to text: prefill once, decode with an exact cache, choose tokens, stream."""
