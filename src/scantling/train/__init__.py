"""Training: loss, optimisers, schedules, the loop, checkpoints that survive a kill, and the proof of its equalities."""
