"""One process a node: it owns the replica memory, talks to its peers, and starts the ranks."""
