"""vLLM as the generator: an engine in an interpreter of its own, whose torch is another one."""
