"""The paper's algorithms as pure functions: no I/O, no clock, no randomness."""
