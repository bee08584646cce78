"""The findings of ``doctor`` (``DigestEngine.examine``): facts that are asked for, and checks that judge them.

A new quirk of a server goes to ``server.py``, and a new finding on a namespace to ``namespace.py``: in both it is a
function in ``CHECKS``, and a field of the facts if it needs another answer.
"""
