"""Brings rows into one form, wherever they come from: lists, dictionaries and Python's numbers, without the keys that Arrow adds."""

from collections.abc import Mapping

from nemo_rl_cpp.data.interfaces import Indexed, Row

_ARROW = ("datasets", "pandas", "polars", "pyarrow")


def plain(value: object) -> object:
    """Turns arrays, Series and tuples into lists, other mappings into dictionaries and scalars of numpy into Python's, at any depth.

    Values of other types stay. Mappings inside an array of objects lose their null keys: pandas makes such arrays of Arrow's lists.
    """
    convert = getattr(value, "tolist", None) or getattr(value, "to_list", None)  # numpy, torch and pandas; polars
    if convert is not None and not isinstance(value, type):
        if _holds_objects(value):
            return _unpadded([plain(item) for item in value])
        value = convert()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def comes_from_arrow(rows: object) -> bool:
    """Whether `rows` is a table or data set of a library that keeps or reads columns by Arrow."""
    return any(base.__module__.partition(".")[0] in _ARROW for base in type(rows).__mro__)


def came_through_pandas(row: object) -> bool:
    """Whether a mapping's values include an array of objects, so that its structs are Arrow's, too."""
    return isinstance(row, Mapping) and any(_holds_objects(value) for value in row.values())


def _holds_objects(value: object) -> bool:
    return str(getattr(value, "dtype", "")) == "object" and getattr(value, "ndim", 0) == 1


def without_padding(row: Row) -> Row:
    """Removes null keys from the mappings inside columns; columns that are null stay.

    All structs of an Arrow column have the same keys, so that each gets a null under every key that only others were given.
    """
    return {name: _unpadded(value) for name, value in row.items()}


def _unpadded(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _unpadded(item) for key, item in value.items() if item is not None}
    return [_unpadded(item) for item in value] if isinstance(value, list) else value


def row_at(rows: Indexed[Row], index: int) -> Row:
    """Row `index` of a data set as it was written."""
    return without_padding(rows[index]) if comes_from_arrow(rows) else rows[index]
