"""The paper's own numbers, and what the planning functions make of them."""
