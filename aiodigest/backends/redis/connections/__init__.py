"""URLs, and connections to a server, to a cluster, and through sentinels."""
