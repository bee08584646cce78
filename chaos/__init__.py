"""Real processes and a real server, through a seeded plan of faults; then every record is accounted for.

``make chaos``, or ``python -m chaos --help``.
"""
