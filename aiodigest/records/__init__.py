"""The bytes around a record, and checks of what callers give."""
