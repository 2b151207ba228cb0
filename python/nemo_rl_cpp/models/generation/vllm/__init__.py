"""Generation by a vLLM server. vLLM runs in a separate interpreter, because it needs a different torch version."""
