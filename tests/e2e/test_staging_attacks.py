"""What docs/security.md says that a hostile peer can do and cannot, tried against processes of their own."""

import asyncio
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from oasiskv.core.errors import BlockNotFoundError, InvalidRequestError, LeaseExpiredError, UnsupportedError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.checksums import checksum, checksums
from oasiskv.services.clients.session import FetchStatus, SessionConfig, StagingSession
from oasiskv.services.clients.staging import MappedPool, StagingClient
from oasiskv.services.rpc.testing import make_certificate, tls_files
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import NUM_BLOCKS, SHAPE, fetch, keys, session, stage
from oasiskv.services.staging.testing import random_blocks as large_blocks
from oasiskv.services.testing import NUM_PARTS, Peer, Server, peer, random_blocks, running

# Runs as a user of no rights; says what it could open of a process and its socket.
STRANGER = """
import glob, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
opened = []
for path in glob.glob(f"/proc/{sys.argv[1]}/fd/*") + [f"/proc/{sys.argv[1]}/mem", sys.argv[3]]:
    try:
        opened.append(os.open(path, os.O_RDONLY))
    except OSError:
        pass
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[2])
    opened.append("socket")
except OSError:
    pass
print(opened)
"""


async def parts_of(user: Peer, peer_id: str, lease_id: str, block_index: int = 0) -> AsyncIterator[bytes]:
    wanted = pb.PartRange(block_index=block_index, num_parts=NUM_PARTS)
    async for part in user.client.get(peer_id, lease_id, [wanted]):
        yield part.data


def test_in_strict_mode_a_peer_reads_what_it_holds_a_lease_on_and_nothing_else(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with peer(server) as owner, peer(server) as thief:
            content = random_blocks(1, b"a", b"b")
            written = await owner.stage(content)
            lease = await owner.lease(b"a")
            mine = (await thief.lease(b"b")).lease_id
            stub, client = thief.client.stub, thief.client
            for lease_id in (written, lease.lease_id):  # whoever learns of it
                with pytest.raises(LeaseExpiredError):
                    _ = [part async for part in parts_of(thief, thief.peer_id, lease_id)]
                with pytest.raises(LeaseExpiredError):
                    await thief.describe(lease_id)
                with pytest.raises(LeaseExpiredError):
                    await client.put(thief.peer_id, lease_id, [(0, 0, bytes(256))])
                with pytest.raises(LeaseExpiredError):
                    await thief.seal(lease_id, random_blocks(2, b"x"))
                request = pb.HandoffRequest(peer_id=thief.peer_id, lease_id=lease_id, ttl_ms=1000)
                with pytest.raises(LeaseExpiredError):
                    await client.call(stub.Handoff, request)
                renew = pb.RenewRequest(peer_id=thief.peer_id, lease_ids=[lease_id], ttl_ms=1000)
                assert list((await client.call(stub.Renew, renew)).lost_lease_ids) == [lease_id]
                assert await thief.release(lease_id) == 0
            with pytest.raises(InvalidRequestError, match="block_index"):
                _ = [part async for part in parts_of(thief, thief.peer_id, mine, 1)]
            with pytest.raises(InvalidRequestError, match="write lease"):
                await client.put(thief.peer_id, mine, [(0, 0, bytes(256))])
            await thief.release(mine)
            with pytest.raises(LeaseExpiredError):
                _ = [part async for part in parts_of(thief, thief.peer_id, mine)]
            for guess in ("", "0" * 32, owner.peer_id[:-1], mine):
                with pytest.raises(LeaseExpiredError):
                    _ = [part async for part in parts_of(thief, guess, lease.lease_id)]
            np.testing.assert_array_equal((await owner.read(lease.lease_id, 1))[0], content[b"a"])

    with running(tmp_path, "is_strict = true") as server:
        asyncio.run(scenario(server))


def test_a_strict_service_has_no_way_past_it(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with StagingClient(server.address) as client, peer(server) as user:
            for access in (pb.ACCESS_MAP_READ, pb.ACCESS_MAP_WRITE):
                with pytest.raises(UnsupportedError, match="strict"):
                    await Peer.register(client, access)
            with pytest.raises(UnsupportedError):
                await client.attach(user.peer_id).offer()
            assert user.registered.memory_socket == ""

    with running(tmp_path, "is_strict = true") as server:
        asyncio.run(scenario(server))
        process = psutil.Process(server.process.pid)
        assert process.children() == []
        assert [one.laddr for one in process.net_connections("unix") if one.laddr] == []
        listening = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert len(listening) == 1
        assert not any(path.is_socket() for path in tmp_path.iterdir())


def test_tenants_by_certificate_neither_find_nor_forge_one_anothers_blocks(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    for name in ("server", "red", "blue"):
        make_certificate(tmp_path, name, authority)
    tls = {name: str(path) for name, path in asdict(tls_files(tmp_path, "server")).items()}
    staging = {"is_strict": True, "memory_socket": "", "tenants": "certificate"}

    def open_as(name: str, address: str) -> StagingSession:
        config = SessionConfig(
            address=address, fingerprint=SHAPE, name=name, may_write=True, tls=tls_files(tmp_path, name)
        )
        return StagingSession(config)

    async def watched(name: str, address: str) -> set[bytes]:
        async with StagingClient(address, tls=tls_files(tmp_path, name)) as client:
            return set((await client.stub.Watch(pb.WatchRequest()).read()).sealed_keys)

    async def found(name: str, address: str, names: list[bytes]) -> list[int]:
        async with StagingClient(address, tls=tls_files(tmp_path, name)) as client:
            answer = await client.call(client.stub.Find, pb.FindRequest(block_keys=names))
            return [holder.num_prefix_blocks for holder in answer.holders]

    with (
        StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging=staging, tls=tls) as server,
        open_as("red", server.address) as red,
        open_as("blue", server.address) as blue,
    ):
        names, ours, theirs = keys("k", 3), large_blocks(11, 3), large_blocks(12, 2)
        lease = stage(red, "k", ours)
        with pytest.raises(BlockNotFoundError):
            blue.lease(names).result()
        assert asyncio.run(found("blue", server.address, names)) == []
        stage(blue, "k", theirs)
        for peer_, data in ((red, ours), (blue, theirs)):
            taken = peer_.lease(names).result()
            statuses, out = fetch(peer_, taken, taken.num_blocks)
            assert not any(statuses)
            np.testing.assert_array_equal(out, data)
        assert asyncio.run(found("red", server.address, names)) == [3]
        assert asyncio.run(watched("red", server.address)) == set(names)
        assert asyncio.run(watched("blue", server.address)) == set(names[:2])
        for key in (b"", bytes(241)):
            with pytest.raises(InvalidRequestError, match="1 to 240 bytes"):
                blue.lease([key]).result()
        # What is handed over on purpose goes to whoever gets the handle.
        given = blue.accept(red.hand_off(lease).result()).result()
        np.testing.assert_array_equal(fetch(blue, given, 3)[1], ours)


def test_a_peer_cannot_drain_a_service_that_names_who_may(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    for name in ("server", "engine", "operator"):
        make_certificate(tmp_path, name, authority)
    tls = {name: str(path) for name, path in asdict(tls_files(tmp_path, "server")).items()}
    staging = {"is_strict": True, "memory_socket": "", "drained_by": ["operator"]}

    async def drain_as(name: str) -> bool:
        async with StagingClient(server.address, tls=tls_files(tmp_path, name)) as client:
            try:
                await client.call(client.stub.Drain, pb.DrainRequest())
            finally:
                stats = await client.call(client.stub.Stats, pb.StatsRequest())
            return bool(stats.is_draining)

    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging=staging, tls=tls) as server:
        with pytest.raises(UnsupportedError, match=r"^caller: expected a certificate that the service names"):
            asyncio.run(drain_as("engine"))
        config = SessionConfig(
            address=server.address, fingerprint=SHAPE, name="e", may_write=True, tls=tls_files(tmp_path, "engine")
        )
        StagingSession(config).close()  # which a service that drains refuses
        assert asyncio.run(drain_as("operator"))


def test_who_may_read_the_pool_sees_all_of_it_and_can_write_none(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with peer(server) as owner, peer(server, pb.ACCESS_MAP_READ) as reader:
            content = random_blocks(3, b"a")
            lease_id = await owner.stage(content)
            (block,) = await owner.describe(lease_id)
            pool = await asyncio.to_thread(MappedPool, reader.peer_id, reader.registered)
            np.testing.assert_array_equal(pool.parts[block.block_id], content[b"a"], "without any lease")
            with pytest.raises(PermissionError):
                mmap.mmap(pool.blocks_fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(pool.blocks_fd, 0)
            with pytest.raises(OSError, match="not permitted"):
                fcntl.fcntl(pool.blocks_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            assert not pool.generations.flags.writeable
            pool.close()

    with running(tmp_path, f'memory_socket = "{tmp_path}/memory.sock"\ntransport = "none"') as server:
        asyncio.run(scenario(server))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_neither_the_memory_nor_the_file_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    tables = f'[disk]\nfolder = "{folder}"\nmax_bytes = 1_000_000\nuse_direct_io = false\n'
    setting = f'memory_socket = "{tmp_path}/memory.sock"\ntransport = "none"'
    with running(tmp_path, setting, tables) as server:
        (blocks,) = folder.glob("*.blocks")
        arguments = [str(server.process.pid), f"{tmp_path}/memory.sock", str(blocks)]
        command = [sys.executable, "-c", STRANGER, *arguments]
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
        assert found.stdout == "[]\n"


def test_a_reader_over_the_network_can_write_in_spite_of_its_access_and_is_found_out(tmp_path: Path) -> None:
    with (
        StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"transport": "tcp"}) as server,
        session(server, "mapped", may_write=True) as owner,
        session(server, "one-sided") as vandal,
        session(server, "one-sided") as reader,
    ):
        data = large_blocks(4, 4)
        lease = stage(owner, "v", data)
        assert lease.block_ids is not None
        pool = vandal._moves._pool
        junk = np.zeros((1, 1, SHAPE.part_bytes), np.uint8)
        vandal.register(junk)
        pool.write(lease.block_ids[2:3], 1, junk, 10.0, lambda rows: None)  # type: ignore[union-attr]
        statuses, out = fetch(reader, reader.lease(keys("v", 4)).result(), 4)
        assert statuses == [0, 0, FetchStatus.CORRUPT, 0]
        np.testing.assert_array_equal(out[[0, 1, 3]], data[[0, 1, 3]])
        assert reader.lease(keys("v", 4)).result().num_blocks == 2, "nobody is sent to it again"


def test_the_agent_has_nothing_worth_reading_but_the_pool(tmp_path: Path) -> None:
    staging = {"transport": "tcp", "locality": "remote"}
    env = {"REDIS_PASSWORD": "a secret", "OTEL_EXPORTER_OTLP_HEADERS": "a secret too"}
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging=staging, env=env) as server:
        place = Path(f"/proc/{server.agent_pid()}")
        assert b"secret" in Path(f"/proc/{server.process.pid}/environ").read_bytes()
        assert b"secret" not in (place / "environ").read_bytes()
        assert str(tmp_path).encode() not in (place / "cmdline").read_bytes()
        files = {os.readlink(link) for link in (place / "fd").iterdir()}
        named = {name for name in files if name.startswith("/") and not name.startswith(("/dev/", "/memfd:", "/proc/"))}
        assert named <= {str(server.log)}
        assert {name.split()[0] for name in files if "memfd" in name} == {
            "/memfd:oasiskv-staging-blocks",
            "/memfd:oasiskv-staging-generations",
        }


def test_who_may_write_can_be_first_under_any_key_but_never_replace_what_is_held(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with peer(server) as honest, peer(server) as liar:
            content = random_blocks(5, b"a")
            await honest.stage(content)
            await liar.stage(random_blocks(6, b"a"))
            assert await honest.check([b"a"], content) == [b"a"]
            lie = random_blocks(7, b"b")
            await liar.stage(lie)
            await honest.stage(random_blocks(8, b"b"))
            assert await honest.check([b"b"], lie) == [b"b"], "nobody can tell whose bytes belong to a key"

    with running(tmp_path, "is_strict = true") as server:
        asyncio.run(scenario(server))


def test_a_checksum_that_is_a_lie_seals_nothing_and_nobody_finds_it(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with peer(server) as liar:
            lease = await liar.allocate(1)
            data = bytes(range(256))
            put = pb.PutRequest(peer_id=liar.peer_id, lease_id=lease.lease_id, data=data, checksum=checksum(data) ^ 1)
            with pytest.raises(Exception, match="arrived with other bytes"):
                await liar.client.call(liar.client.stub.Put, iter([put]))
            content = random_blocks(9, b"c")
            sums = checksums(content[b"c"]).tolist()
            sums[1] ^= 1
            block = pb.SealedBlock(block_index=0, block_key=b"c", checksums=sums)
            request = pb.SealRequest(peer_id=liar.peer_id, lease_id=lease.lease_id, blocks=[block])
            with pytest.raises(Exception, match="differs from its bytes"):
                await liar.client.call(liar.client.stub.Seal, request)
            with pytest.raises(BlockNotFoundError):
                await liar.lease(b"c")

    with running(tmp_path, "is_strict = true") as server:
        asyncio.run(scenario(server))


def test_no_identifier_is_in_the_log(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"transport": "tcp"}) as server:
        with session(server, "mapped", may_write=True) as owner, session(server, "one-sided") as other:
            lease = stage(owner, "secret key", large_blocks(10, 2))
            handle = owner.hand_off(lease).result()
            taken = other.accept(handle).result()
            secrets = [lease.lease_id, taken.lease_id, handle, owner._peer_id, other._peer_id, "secret key"]
        server.stop()
        log = server.log.read_text()
        assert "registered to map_write" in log
        assert [one for one in secrets if one in log] == []
