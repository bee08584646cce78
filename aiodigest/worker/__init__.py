"""The work of a shard worker: claiming, renewing, delivering and reporting; the scheduler supervises it."""
