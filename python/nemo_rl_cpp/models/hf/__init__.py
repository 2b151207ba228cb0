"""Models of transformers (extra `hf`) in training and generation: `policy.backend: hf`, `value.backend: hf`,
`policy.generation.backend: hf`.

Nothing here imports transformers before a model is opened.
"""
