"""The launcher: one process per node and job that starts, watches and restarts the node's ranks.

It is apart from the agent, so that an agent's death stops no training. `assignments.py` says what it needs from the
agent; `rendezvous.py` and `elastic.py` plug that into torch elastic; `warm_server.py` makes ranks start warm.
"""
