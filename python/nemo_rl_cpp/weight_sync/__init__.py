"""How new weights reach the generation engine."""
