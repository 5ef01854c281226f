"""Checkpoint memory of a node: the replica store on tmpfs and its copies on peer nodes. Read `interface.py` first."""
