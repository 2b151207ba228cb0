"""Training and generation with transformers models (extra `hf`): `policy.backend: hf`, `value.backend: hf`,
`policy.generation.backend: hf`.

transformers is only imported when a model is opened."""
