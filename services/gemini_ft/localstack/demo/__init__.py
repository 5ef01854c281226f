"""`gemini-ft demo`: a real training run loses a rank, an agent, a machine and the control plane, and ends bit for bit
as if nothing had happened.

`scenario.py` says what is broken and when; `observe.py` sees what happens; `view.py` and `report.py` show it;
`demo.py` runs it all.
"""
