"""The backend on Redis and Valkey: ``backend.py``, on one Lua script a transition."""
