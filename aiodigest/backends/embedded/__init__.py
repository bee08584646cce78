"""An embedded Valkey server: ``embedded://``."""
