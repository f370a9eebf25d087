"""Whether applying an object would change anything, so that nothing is sent when it would not."""

import json
from collections.abc import Mapping
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator.kinds import quantity


def differs(wanted: Mapping[str, Any], live: Mapping[str, Any], manager: str) -> bool:
    """Return whether server-side apply of `wanted` by `manager` would change `live`.

    It would if a field has another value, or if `live` has one that `manager` applied earlier and no longer wants. What
    the API server or others filled in does not count.
    """
    owned = next(
        (
            entry["fieldsV1"]
            for entry in live["metadata"].get("managedFields", ())
            if entry["manager"] == manager and entry["operation"] == "Apply" and not entry.get("subresource")
        ),
        None,
    )
    return owned is None or not _is_within(wanted, live) or not _says_all(owned, wanted)


def _is_within(wanted: Any, live: Any) -> bool:
    if isinstance(wanted, Mapping):
        if live is None:
            return not wanted
        return isinstance(live, Mapping) and all(_is_within(each, live.get(key)) for key, each in wanted.items())
    if isinstance(wanted, list):
        if not wanted or not isinstance(live, list):
            return not wanted and not live
        if len(wanted) == len(live) and all(map(_is_within, wanted, live)):
            return True
        # Others may add items to a list whose items have names, such as owners or, in a webhook, volumes.
        return isinstance(wanted[0], Mapping) and all(any(_is_within(each, other) for other in live) for each in wanted)
    if wanted == "" and live is None:
        return True
    return bool(wanted == live) or _is_same_quantity(wanted, live)


def _is_same_quantity(wanted: Any, live: Any) -> bool:
    if not isinstance(wanted, str) or not isinstance(live, str | int):
        return False
    try:
        return quantity(wanted) == quantity(str(live))
    except ConfigError:
        return False


def _says_all(owned: Mapping[str, Any], wanted: Any) -> bool:
    """Return whether `wanted` has every field of `owned`, which is written as the API server does: `fieldsV1`."""
    for key, below in owned.items():
        mark, _, rest = key.partition(":")
        if mark == "f":
            if not isinstance(wanted, Mapping) or rest not in wanted:
                return False
            inner = wanted[rest]
        elif mark == "k":
            names = json.loads(rest)
            inner = next((each for each in wanted if all(each.get(key) == names[key] for key in names)), None)
            if inner is None:
                return False
        else:
            continue  # the item itself, or a value of a set, which `_is_within` has compared
        if below and not _says_all(below, inner):
            return False
    return True
