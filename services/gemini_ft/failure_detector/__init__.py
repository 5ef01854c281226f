"""The failure detector: heartbeats and silence in, verdicts out.

`judge.py` decides, purely and by an injected monotonic clock; `accrual.py` turns silence into suspicion;
`service.py` connects them to NATS. The detector keeps nothing itself: it may be killed at any moment.
"""
