import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTOS = Path(__file__).parents[3] / "protos"
OLD = """
syntax = "proto3";
package toy.v1;
service Toy { rpc Ask(Question) returns (Answer); }
enum Kind { KIND_UNSPECIFIED = 0; KIND_SHORT = 1; }
message Question { string text = 1; uint32 limit = 2; Kind kind = 3; }
message Answer { string text = 1; oneof more { string a = 2; string b = 3; } }
"""


def load_generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generate()


@pytest.fixture
def descriptors(tmp_path: Path) -> Callable[[str], FileDescriptorSet]:
    def build(source: str) -> FileDescriptorSet:
        (tmp_path / "toy.proto").write_text(source)
        generate.generate(tmp_path, root=tmp_path)
        read: FileDescriptorSet = generate.read_descriptors(tmp_path / "toy.binpb")
        return read

    return build


def test_generating_again_gives_the_committed_files_and_no_others(tmp_path: Path) -> None:
    written = generate.generate(tmp_path)
    committed = [path for path in PROTOS.rglob("*") if "_pb2" in path.name or path.suffix == ".binpb"]
    committed = [path for path in committed if path.suffix != ".pyc"]
    assert sorted(path.relative_to(tmp_path) for path in written) == sorted(p.relative_to(PROTOS) for p in committed)


def test_every_call_of_the_contracts_says_what_it_does() -> None:
    for proto in PROTOS.rglob("*.proto"):
        lines = [line.strip() for line in proto.read_text().splitlines()]
        for above, line in itertools.pairwise(lines):
            if line.startswith("rpc ") and not above.startswith("//"):
                pytest.fail(f"{proto.name}: no comment above {line}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("uint32 limit = 2;", ""),
        ("uint32 limit = 2;", "reserved 2;"),
        ("uint32 limit = 2;", "uint64 limit = 2;"),
        ("uint32 limit = 2;", "uint32 most = 2;"),
        ("uint32 limit = 2;", "uint32 limit = 4;"),
        ("uint32 limit = 2;", "repeated uint32 limit = 2;"),
        ("oneof more { string a = 2; string b = 3; }", "string a = 2; string b = 3;"),
        ("KIND_SHORT = 1;", ""),
        ("KIND_SHORT = 1;", "KIND_LONG = 1;"),
        ("returns (Answer)", "returns (stream Answer)"),
        ("rpc Ask(", "rpc Tell("),
        ("service Toy", "service Tool"),
    ],
)
def test_a_change_that_old_peers_misread_is_found(
    descriptors: Callable[[str], FileDescriptorSet], before: str, after: str
) -> None:
    assert before in OLD
    assert len(generate.breaks(descriptors(OLD), descriptors(OLD.replace(before, after)))) >= 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("uint32 limit = 2;", 'reserved 2; reserved "limit";'),
        ("uint32 limit = 2;", "uint32 limit = 2; string more = 9;"),
        ("KIND_SHORT = 1;", "KIND_SHORT = 1; KIND_LONG = 2;"),
        ("KIND_SHORT = 1;", 'reserved 1; reserved "KIND_SHORT";'),
        ("rpc Ask(", "rpc Tell(Answer) returns (Answer); rpc Ask("),
    ],
)
def test_a_change_that_old_peers_do_not_notice_is_let_through(
    descriptors: Callable[[str], FileDescriptorSet], before: str, after: str
) -> None:
    assert before in OLD
    assert generate.breaks(descriptors(OLD), descriptors(OLD.replace(before, after))) == []


def test_a_message_within_a_message_is_compared_too(descriptors: Callable[[str], FileDescriptorSet]) -> None:
    nested = OLD + "message Outer { message Inner { string text = 1; } Inner inner = 1; }"
    changed = nested.replace("message Inner { string", "message Inner { bytes")
    assert len(generate.breaks(descriptors(nested), descriptors(changed))) == 1


def test_a_breaking_change_writes_nothing_unless_it_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_bytes((PROTOS / "generate.py").read_bytes())
    (tmp_path / "toy.proto").write_text(OLD)
    command = [sys.executable, str(tmp_path / "generate.py")]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "toy.proto").write_text(OLD.replace("uint32 limit = 2;", ""))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "Question.limit is gone" in refused.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    subprocess.run([*command, "--break"], check=True, capture_output=True)
    question = generate.read_descriptors(tmp_path / "toy.binpb").file[0].message_type[0]
    assert [field.name for field in question.field] == ["text", "kind"]


def commit(folder: Path) -> None:
    name = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for arguments in (["add", "-A"], [*name, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def test_the_check_finds_a_break_of_any_contract_that_was_ever_committed(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, capture_output=True)
    proto = tmp_path / "toy.proto"
    grown = OLD.replace("uint32 limit = 2;", "uint32 limit = 2; uint32 later = 4;")
    for source in (OLD, grown):
        proto.write_text(source)
        assert generate.check(tmp_path), "nothing is generated yet"
        generate.generate(tmp_path, root=tmp_path)
        assert generate.check(tmp_path) == []
        commit(tmp_path)
    proto.write_text(OLD.replace("uint32 limit = 2;", "uint32 most = 2;"))
    generate.generate(tmp_path, root=tmp_path)
    commit(tmp_path)
    renamed, lost = generate.check(tmp_path)
    assert renamed.startswith("toy.v1.Question: field 2 was ('limit'")
    assert lost == "toy.v1.Question.later is gone, and its number and name are not reserved"
    (tmp_path / "accepted-breaks.txt").write_text(f"{lost}\n{renamed}\n")
    assert generate.check(tmp_path) == []


def test_what_is_committed_here_is_up_to_date_and_understood_by_all_earlier_peers() -> None:
    assert generate.check() == []
