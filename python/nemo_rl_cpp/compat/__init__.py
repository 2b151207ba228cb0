"""The names that NeMo RL's guides print for environments, data processors, data sets, estimators and losses of a user, at the
paths where they print them: code that uses them replaces `nemo_rl` by `nemo_rl_cpp.compat`. docs/porting-from-nemo-rl.md tells how
to port the rest. Nothing else in the package imports from here.
"""
