"""The one name of OmegaConf that a run hands to NeMo Gym."""

DictConfig = dict
