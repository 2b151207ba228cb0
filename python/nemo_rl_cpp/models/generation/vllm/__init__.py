"""vLLM as the generator: a server, whose interpreter has another torch."""
