"""Everything on one machine: private NATS and Postgres servers, and processes that can be found and ended.

`server.py` is the interface; `nats.py` and `postgres.py` implement it. Services and agents are started as
processes (`processes.py`), never imported.
"""
