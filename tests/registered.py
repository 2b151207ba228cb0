"""Removes what a test has registered in a table of the configuration."""

from nemo_rl_cpp.config.base import rebuild


def forget(entries, name, section=None, keys=()):
    """Remove an entry, and the keys that it has added to a section and to its subclasses."""
    del entries[name]
    if section is None:
        return
    for each in (section, *section.__subclasses__()):
        for key in keys:
            each.model_fields.pop(key)
    rebuild(section)
