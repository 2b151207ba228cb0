"""NeMo RL's module tree over this package: code written for NeMo RL replaces `nemo_rl` by `nemo_rl_cpp.compat`.

Each module has what the package has at that place, and what only such code calls. Nothing else in the package imports
from here.
"""
