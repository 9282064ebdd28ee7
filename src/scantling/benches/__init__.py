"""Measuring generation: contenders in processes of their own, interleaved, beside what the part tree predicts."""
