"""Where in a run a call stands: a path such as `3`, or `3.1.2` and `@left.1` inside branches, or `#call_7` for a call with a key."""

from __future__ import annotations


def within(path: str, segment: str) -> str:
    """The position of `segment` in the branch at `path`; the run's own branch has the path ""."""
    return f"{path}.{segment}" if path else segment


def branch_of(position: str) -> str:
    """The path of the branch in which a position stands."""
    return position.rpartition(".")[0]


def named(name: str) -> str:
    """The segment of a branch that has a name: the same whichever branch is opened first."""
    return "@" + _escaped(name)


def keyed(key: str) -> str:
    """The segment of a call that has a key: the same in whatever order calls are made."""
    return "#" + _escaped(key)


def is_keyed(position: str) -> bool:
    """Whether the call has a key."""
    return position.rpartition(".")[2].startswith("#")


def _escaped(name: str) -> str:
    """Dots part segments, so a name has none."""
    return name.replace("%", "%25").replace(".", "%2E") if "." in name or "%" in name else name
