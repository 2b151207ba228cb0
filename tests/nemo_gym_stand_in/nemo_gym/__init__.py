"""A stand-in for the package nemo-gym: the four names that a run uses, with one agent that asks the policy for a digit.

It has NeMo Gym's protocol: `run_examples` yields awaitables of (row, result of the agent's /run), and the model server
merges `metadata.extra_body` of a request into the body of the policy's chat completion."""
