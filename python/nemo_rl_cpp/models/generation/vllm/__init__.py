"""Generation by a vLLM server, whose interpreter uses a different torch version."""
