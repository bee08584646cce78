"""Ways to send digests: each channel is a callback, and imports its library when it is made."""
