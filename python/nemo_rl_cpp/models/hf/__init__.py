"""Models of transformers (extra `hf`) in training and generation: `policy.backend: hf`, `value.backend: hf`,
`policy.generation.backend: hf`.

transformers is only imported when a model is opened.
"""
