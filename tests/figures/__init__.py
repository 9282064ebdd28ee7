"""Figures commonly quoted for Transformers, recomputed: docs/figures.md."""
