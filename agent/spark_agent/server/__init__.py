"""The local API server: OpenAI-compatible requests in, tokens of the engine out, routing counted on the way."""
