"""StarBridge: the engine behind an HTTP API that OpenAI's clients use unchanged."""
