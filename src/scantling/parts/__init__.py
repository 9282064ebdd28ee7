"""The parts of a Transformer: each gives its weights, its rows of the trace, its state and its computation."""
