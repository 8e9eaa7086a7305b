"""GGUF files that other tools on this machine already hold: found, read by their headers, named. Never written."""
