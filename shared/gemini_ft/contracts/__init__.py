"""What crosses a process border: messages, subjects, identifiers, errors, frames and the layout of shared
memory.

Nothing in this package does I/O. `errors.py` draws the error tree; `frames.py` is the wire codec;
`local_protocol.py`, `data_protocol.py` and `messages.py` hold the messages of the node's socket, the data
plane and the control plane.
"""
