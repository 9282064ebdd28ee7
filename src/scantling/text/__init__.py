"""Text in and out: tokenizers, streamed decoding and chat templates."""
