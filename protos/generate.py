"""Write the code generated from every .proto file, and refuse a change that breaks those who speak the committed one.

`make protos` runs it. Beside each .proto stand `_pb2.py`, `_pb2.pyi`, `_pb2_grpc.py` and the descriptor set `.binpb`:
the committed contract, which the next change is held against.

`make check` runs it with `--check`, which writes nothing: what is committed is what would be generated, and those who
speak any contract that was ever committed still understand this one. Breaks that were accepted stand in
`accepted-breaks.txt`, a sentence of `breaks` each.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).parent


def generate(out: Path, root: Path = ROOT) -> list[Path]:
    """Generate from all .proto files below `root` into the same places below `out`, and return the written files.

    Raises:
        SystemExit: A .proto file is wrong; protoc printed why.
    """
    written = []
    for proto in sorted(root.rglob("*.proto")):
        place = out / proto.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        # In a process of its own: protoc brings a protobuf library that does not bear with those of others.
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={root}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--descriptor_set_out={place.with_suffix('.binpb')}",
            str(proto),
        ]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"error: protoc refused {proto}")
        written += [place.with_name(place.stem + end) for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", ".binpb")]
    return written


def breaks(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return what a peer that was built from `old` would misread or miss in `new`, one sentence each."""
    found: list[str] = []
    messages, enums, services = _messages(new), _enums(new), _services(new)
    for name, message in _messages(old).items():
        found += [f"{name} is gone"] if name not in messages else _message_breaks(name, message, messages[name])
    for name, enum in _enums(old).items():
        found += [f"{name} is gone"] if name not in enums else _enum_breaks(name, enum, enums[name])
    for name, service in _services(old).items():
        found += [f"{name} is gone"] if name not in services else _service_breaks(name, service, services[name])
    return found


def _message_breaks(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    reserved = {number for span in new.reserved_range for number in range(span.start, span.end)}
    for field in old.field:
        if field.number not in fields:
            if field.number not in reserved or field.name not in new.reserved_name:
                yield f"{name}.{field.name} is gone, and its number and name are not reserved"
        elif _meaning(old, field) != _meaning(new, fields[field.number]):
            yield f"{name}: field {field.number} was {_meaning(old, field)}, is {_meaning(new, fields[field.number])}"


def _meaning(message: DescriptorProto, field: FieldDescriptorProto) -> tuple[str, ...]:
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type)
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.name, kind, FieldDescriptorProto.Label.Name(field.label), oneof


def _enum_breaks(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    # Unlike those of messages, reserved ranges of enums include their end.
    reserved = {number for span in new.reserved_range for number in range(span.start, span.end + 1)}
    for value in old.value:
        if value.number not in values:
            if value.number not in reserved or value.name not in new.reserved_name:
                yield f"{name}.{value.name} is gone, and its number and name are not reserved"
        elif values[value.number] != value.name:
            yield f"{name}: value {value.number} was {value.name}, is {values[value.number]}"


def _service_breaks(name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for method in old.method:
        if method.name not in methods:
            yield f"{name}.{method.name} is gone"
        elif method != methods[method.name]:
            yield f"{name}.{method.name} takes, returns or streams something else"


def _messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    def walk(prefix: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
        name = f"{prefix}.{message.name}"
        yield name, message
        for nested in message.nested_type:
            yield from walk(name, nested)

    return dict(pair for file in files.file for message in file.message_type for pair in walk(file.package, message))


def _enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    nested = {f"{name}.{enum.name}": enum for name, message in _messages(files).items() for enum in message.enum_type}
    return nested | {f"{file.package}.{enum.name}": enum for file in files.file for enum in file.enum_type}


def _services(files: FileDescriptorSet) -> dict[str, ServiceDescriptorProto]:
    return {f"{file.package}.{service.name}": service for file in files.file for service in file.service}


def read_descriptors(path: Path) -> FileDescriptorSet:
    """Return the descriptor set in a file; an empty one if there is no file."""
    return FileDescriptorSet.FromString(path.read_bytes()) if path.exists() else FileDescriptorSet()


def earlier_contracts(contract: Path) -> list[FileDescriptorSet]:
    """Return every version of a committed contract that this repository knows, none outside of one."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(contract.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True).stdout

    try:
        commits = git("log", "--format=%H", "--diff-filter=AM", "--", contract.name).decode().split()
        return [FileDescriptorSet.FromString(git("show", f"{commit}:./{contract.name}")) for commit in commits]
    except (OSError, subprocess.CalledProcessError):
        return []


def check(root: Path = ROOT) -> list[str]:
    """Return what is wrong with what is committed, one sentence each."""
    accepted = (
        (root / "accepted-breaks.txt").read_text().splitlines() if (root / "accepted-breaks.txt").exists() else []
    )
    with TemporaryDirectory() as folder:
        out = Path(folder)
        written = [path.relative_to(out) for path in generate(out, root)]
        found = [
            f"{path} is not what `make protos` writes"
            for path in written
            if not (root / path).exists() or (root / path).read_bytes() != (out / path).read_bytes()
        ]
        contracts = sorted({path.relative_to(root) for path in root.rglob("*.binpb")})
        for contract in contracts:
            now = read_descriptors(out / contract)
            for before in earlier_contracts(root / contract):
                found += [line for line in breaks(before, now) if line not in accepted and line not in found]
    return found


def main() -> int:
    """Generate in place, unless that would break the committed contract; or check what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="may_break", action="store_true", help="accept a change that breaks peers")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if something is out of date")
    args = parser.parse_args()
    if args.check:
        problems = check()
        print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
        return bool(problems)
    may_break: bool = args.may_break
    with TemporaryDirectory() as folder:
        out = Path(folder)
        written = [path.relative_to(out) for path in generate(out)]
        contracts = [path.relative_to(ROOT) for path in ROOT.rglob("*.binpb")]
        found = [line for path in contracts for line in breaks(*map(read_descriptors, (ROOT / path, out / path)))]
        if found and not may_break:
            print("error: nothing written, since it would break peers (--break accepts that):", file=sys.stderr)
            print(*found, sep="\n", file=sys.stderr)
            return 1
        for path in written:
            shutil.copyfile(out / path, ROOT / path)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
