"""Connections of aiodigest with FastAPI, Starlette and OpenTelemetry."""
