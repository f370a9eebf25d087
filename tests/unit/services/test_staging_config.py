import asyncio
import re
import sys
from pathlib import Path

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.services.staging import __main__ as main
from oasiskv.services.staging.__main__ import read_config, run
from oasiskv.services.staging.disk_file import DiskConfig

TEXT = """
[staging]
pool_bytes = 10_000
memory_socket = "/run/oasiskv/staging.sock"
[fingerprint]
model_hash = "m"
dtype = "float16"
block_size = 4
num_layers = 3
num_kv_heads = 2
head_dim = 8
[leases]
max_ttl_s = 5.0
[server]
address = "127.0.0.1:0"
[disk]
folder = "/var/lib/oasiskv"
max_bytes = 100_000
[directory]
url = "redis://user:secret@localhost:6379/0"
address = "staging-0:7411"
"""


def test_the_number_of_blocks_follows_from_the_bytes_of_the_pool() -> None:
    config = read_config(TEXT)
    assert config.staging.fingerprint.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    assert config.staging.leases.num_blocks == 10_000 // 768
    assert config.staging.leases.max_blocks_per_peer == 13
    assert config.staging.leases.max_ttl_s == 5.0
    assert config.staging.disk == DiskConfig(folder="/var/lib/oasiskv", max_bytes=100_000)
    assert read_config(TEXT[: TEXT.index("[disk]")]).staging.disk is None


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("pool_bytes = 10_000", "pool_bytes = 767", "staging.pool_bytes"),
        ("pool_bytes = 10_000", "", "staging.pool_bytes"),
        ("pool_bytes = 10_000", 'pool_bytes = "10G"', "staging.pool_bytes"),
        ('memory_socket = "/run/oasiskv/staging.sock"', "", "staging.memory_socket"),
        ("[staging]", "[staging]\nis_strict = true", "staging.memory_socket"),
        ("[staging]", "[staging]\nmemory_sockte = 1", "staging.memory_sockte"),
        ("[staging]", "[staging]\ntransport = 'udp'", "staging.transport: .*shm, none, got 'udp'"),
        ("[staging]", "[staging]\nlocality = 'far'", "staging.locality"),
        ("[staging]", "[staging]\nlocality = 'remote'\ntransport = 'shm'", "staging.transport"),
        ("[staging]", "[staging]\nhuge_pages = true", "staging.huge_pages"),
        ("[staging]", "[staging]\ntenants = 'many'", "staging.tenants"),
        ("[staging]", "[staging]\ntenants = 'certificate'", r"staging.tenants: expected \[tls\]"),
        ("[staging]", "[staging]\nsuccessor = 'somewhere'", "staging.successor"),
        ("[staging]", "[staging]\ndrained_by = ['ops']", r"staging.drained_by: expected \[tls\]"),
        ('dtype = "float16"', 'dtype = "int4"', "fingerprint.dtype"),
        ('dtype = "float16"', "", "fingerprint: .*dtype"),
        ("max_ttl_s = 5.0", "max_ttl_s = 0", "leases.max_ttl_s"),
        ("max_ttl_s = 5.0", "max_ttl_s = '60'", "leases.max_ttl_s: expected a number, got a value of type str"),
        ("max_ttl_s = 5.0", "max_peers = true", "leases.max_peers: expected an integer, got a value of type bool"),
        ("[staging]", "[staging]\nis_strict = 'false'", "staging.is_strict: expected true or false"),
        ("[staging]", "[staging]\ndrain_s = '5'", "staging.drain_s: expected a number"),
        ("[staging]", "[staging]\ndrain_s = -1", "staging.drain_s: expected a number of at least 0"),
        ("[staging]", "[staging]\nhost_limit_bytes = 1.5", "staging.host_limit_bytes: expected an integer"),
        ("max_ttl_s = 5.0", "num_blocks = 5", "leases.num_blocks"),
        ('"127.0.0.1:0"', '"here"', "server.address"),
        ("[staging]", "[staging]\naddress = '127.0.0.1:1'", "staging.address"),
        ("[leases]", "[lease]", "lease: "),
        ("[server]", "[server", "config: expected TOML"),
        ("max_bytes = 100_000", 'max_bytes = "1G"', "disk.max_bytes"),
        ("max_bytes = 100_000", "", "disk: .*max_bytes"),
        ('folder = "/var/lib/oasiskv"', "folder = 5", "disk.folder"),
        ("max_bytes = 100_000", "max_byte = 1", "disk.max_byte"),
        ("redis://", "http://", "directory.url"),
        ('address = "staging-0:7411"', 'address = "staging-0"', "directory.address"),
        ('address = "staging-0:7411"', "", "directory: .*address"),
        ("[directory]", "[directory]\ntimeout_s = 0", "directory.timeout_s"),
        ("[server]", "[tls]\nkey = 'a'\n[server]", "tls: .*certificate"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(before: str, after: str, name: str) -> None:
    assert before in TEXT
    with pytest.raises(ConfigError, match=f"^{name}"):
        read_config(TEXT.replace(before, after))


def test_a_file_for_all_services_is_accepted() -> None:
    text = (Path(__file__).parents[3] / "docs" / "design" / "0004-prefill-and-decode.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    config = read_config(example)
    assert config.server.address == "0.0.0.0:7411"
    assert config.staging.fingerprint.num_layers == 36


def test_a_password_is_not_repeated_in_a_message() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(TEXT.replace("redis://", "http://"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("size", ["2MiB", "1GiB"])
def test_huge_pages_are_beyond_the_limit_of_memory(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT[: TEXT.index("[disk]")].replace("[staging]", f"[staging]\nhuge_pages = '{size}'\nhost_limit_bytes = 1")
    config = read_config(text.replace('memory_socket = "/run/oasiskv/staging.sock"', "is_strict = true"))
    got: list[object] = []

    def memory(*arguments: object) -> None:
        got.extend(arguments)
        raise ConfigError("stop")

    monkeypatch.setattr(main, "StagingMemory", memory)
    with pytest.raises(ConfigError, match="stop"):
        asyncio.run(run(config))
    assert got[-1] == size


def test_a_pool_beyond_the_limit_is_refused_before_any_memory_is_taken() -> None:
    config = read_config(TEXT.replace("[staging]", "[staging]\nhost_limit_bytes = 9_000"))
    with pytest.raises(ConfigError, match=r"exceed the limit .*host_limit_bytes"):
        asyncio.run(run(config))


def test_the_documented_configuration_is_accepted() -> None:
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    config = read_config(example)
    assert config.staging.leases.num_blocks == 2**34 // config.staging.fingerprint.block_bytes
    assert config.server.tls is not None


def test_calls_wait_for_a_thread_that_hashes_half_a_millisecond_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["staging", "--config", str(tmp_path / "absent.toml")])
    before = sys.getswitchinterval()
    try:
        assert main.main() == 2
        assert sys.getswitchinterval() <= 0.0005
    finally:
        sys.setswitchinterval(before)
