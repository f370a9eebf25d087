import re
from pathlib import Path

from oasiskv.core import errors
from oasiskv.core.errors import OasisError

TABLE = Path(__file__).parents[3] / "docs" / "errors.md"


def subclasses(cls: type[OasisError]) -> set[type[OasisError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def test_every_error_class_stands_in_core_errors() -> None:
    public = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, OasisError)}
    assert {cls for cls in subclasses(OasisError) if cls.__module__.startswith("oasiskv.")} == public


def test_the_documented_table_lists_every_error_with_its_retry_advice() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no)\b[^|]*\|$", TABLE.read_text(), flags=re.MULTILINE)
    documented = {name: advice == "yes" for name, advice in rows}
    assert documented == {cls.__name__: cls.retryable for cls in subclasses(OasisError) - {OasisError}}


def test_only_errors_that_time_can_heal_are_retryable() -> None:
    retryable = {cls.__name__ for cls in subclasses(OasisError) if cls.retryable}
    assert retryable == {"PoolExhaustedError", "PeerUnavailableError", "TransferTimeoutError"}
