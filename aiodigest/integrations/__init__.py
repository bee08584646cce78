"""What connects aiodigest with FastAPI, Starlette and OpenTelemetry."""
