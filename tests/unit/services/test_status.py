import re
from pathlib import Path

import grpc
import pytest

from oasiskv.core.errors import OasisError, PeerUnavailableError, PoolExhaustedError, TransferTimeoutError
from oasiskv.services.rpc.status import CODES, ERROR_KEY, code_of, error_of

DOCS = Path(__file__).parents[3] / "docs" / "errors.md"


def subclasses(cls: type[OasisError]) -> set[type[OasisError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def failure(
    code: grpc.StatusCode, name: str | None = None, details: str = "field: expected X, got Y"
) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(ERROR_KEY, name)] if name else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


def test_the_table_covers_every_error() -> None:
    ours = {cls for cls in subclasses(OasisError) if cls.__module__.startswith("oasiskv.")}
    assert set(CODES) == ours - {OasisError}


def test_the_documented_table_says_the_same() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \|$", DOCS.read_text(), flags=re.MULTILINE)
    assert dict(rows) == {cls.__name__: code.name for cls, code in CODES.items()}


@pytest.mark.parametrize("cls", CODES, ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_the_class_that_was_raised(cls: type[OasisError]) -> None:
    arrived = error_of(failure(code_of(cls("field: expected X, got Y")), cls.__name__))
    assert type(arrived) is cls
    assert str(arrived) == "field: expected X, got Y"


def test_a_failure_of_grpc_itself_is_told_from_one_of_the_service() -> None:
    assert type(error_of(failure(grpc.StatusCode.UNAVAILABLE))) is PeerUnavailableError
    assert type(error_of(failure(grpc.StatusCode.DEADLINE_EXCEEDED))) is TransferTimeoutError
    lost = failure(grpc.StatusCode.INTERNAL, details="Internal error from Core")
    assert type(error_of(lost)) is PeerUnavailableError
    unknown = failure(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert error_of(unknown) is unknown
    assert type(error_of(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "PoolExhaustedError"))) is PoolExhaustedError


def test_a_class_that_nobody_knows_stays_an_error_of_grpc() -> None:
    unknown = failure(grpc.StatusCode.INTERNAL, "SystemExit")
    assert error_of(unknown) is unknown
