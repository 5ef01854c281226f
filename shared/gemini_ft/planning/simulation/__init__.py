"""A discrete-event model of a training run with failures: what they cost under each way of making checkpoints."""
