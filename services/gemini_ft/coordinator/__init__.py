"""The coordinator: membership, versions and recoveries of all jobs; REST for people.

`reconcile.py` decides, purely; `store.py` holds all SQL; `observations.py` remembers what was heard; `orders.py`
talks to agents; `leader.py` lets one of several coordinators act; `service.py` turns the loop; `api/` is the public
face.
"""
