"""Training on many devices, on paper: how a model is laid out, what each rank holds, sends and waits for."""
