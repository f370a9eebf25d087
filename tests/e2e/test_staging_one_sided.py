"""Sessions of engines with the staging service: every way that bytes move, and what happens when a side is killed."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from opentelemetry import trace

from oasiskv.cli.main import main
from oasiskv.core.errors import (
    BlockNotFoundError,
    CorruptBlockError,
    InvalidRequestError,
    LeaseExpiredError,
    PeerUnavailableError,
)
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.protos.staging.v1 import staging_pb2_grpc
from oasiskv.services import nixl
from oasiskv.services.clients.session import FetchStatus, SessionConfig, StagingSession
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.rpc.testing import make_certificate, tls_files
from oasiskv.services.staging import bench
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import (
    NUM_BLOCKS,
    SHAPE,
    WAYS,
    fetch,
    keys,
    random_blocks,
    session,
    stage,
    stats,
    until,
)
from oasiskv.services.tracing import context_metadata

MOVES = {"mapped": {"FetchDescriptors"}, "one-sided": {"FetchDescriptors"}, "stream": {"Put", "Get"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagingProcess]:
    folder = tmp_path_factory.mktemp("staging")
    with StagingProcess(folder, SHAPE, NUM_BLOCKS, staging={"transport": "tcp"}) as server:
        yield server
        assert stats(server).num_leases == 0, "every exit of every test gave its leases back"
        assert server.stop() == 0


@pytest.mark.parametrize("writing", WAYS)
def test_what_goes_in_by_one_way_comes_out_the_same_by_every_way(server: StagingProcess, writing: str) -> None:
    data = random_blocks(1, 24)
    with session(server, writing, may_write=True) as writer:
        stage(writer, f"w-{writing}", data)
        for reading in WAYS:
            with session(server, reading) as reader:
                lease = reader.lease([*keys(f"w-{writing}", 24), b"absent"]).result()
                assert lease.num_blocks == 24
                statuses, out = fetch(reader, lease, 24)
                assert statuses == [FetchStatus.OK] * 24
                np.testing.assert_array_equal(out, data)
                assert reader.num_retried_blocks == 0


@pytest.mark.parametrize("way", WAYS)
def test_layers_and_heads_of_some_blocks_come_in_one_batch(server: StagingProcess, way: str) -> None:
    data = random_blocks(2, 32)
    with session(server, way, may_write=True) as peer:
        lease = peer.allocate(32).result()
        for layer in range(SHAPE.num_layers):  # as prefill computes them
            piece = np.ascontiguousarray(data[:, layer : layer + 1])
            peer.register(piece)
            peer.put(lease, range(32), layer, piece).result()
        peer.seal(lease, range(32), keys(f"l-{way}", 32)).result()
        wanted = np.random.default_rng(3).permutation(32)[:11]
        out = np.zeros((11, 2, SHAPE.part_bytes), np.uint8)
        peer.register(out)
        assert not peer.fetch(lease, wanted, 1, out).result().any()
        np.testing.assert_array_equal(out, data[wanted, 1:3])
        head = out.reshape(11, 2, SHAPE.num_kv_heads, -1)[:, :, 5]
        np.testing.assert_array_equal(head, data[wanted, 1:3].reshape(11, 2, SHAPE.num_kv_heads, -1)[:, :, 5])


def test_a_service_that_is_forced_to_be_remote_hands_no_memory_over(tmp_path: Path) -> None:
    data = random_blocks(4, 8)
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"locality": "remote", "transport": "tcp"}) as server:
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="test", may_write=True)
        with StagingSession(config) as peer:
            assert peer.path == "one-sided"
            assert peer.path_reason == "the service hands no memory over; over tcp"
            statuses, out = fetch(peer, stage(peer, "r", data), 8)
            assert not any(statuses)
            np.testing.assert_array_equal(out, data)
            found = stats(server)
            assert (found.transport, found.transport_reason) == ("tcp", "the configuration says tcp")
            assert found.num_links == 1
            assert "small pages: " in found.memory_reason or "huge pages of" in found.memory_reason
        until(lambda: stats(server).num_links == 0)
        assert not (tmp_path / "memory.sock").exists()


def listening(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("inet")
    return {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}


def test_a_service_on_the_loopback_opens_no_port_to_others(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"locality": "remote", "transport": "tcp"}) as server:
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="test", may_write=False)
        before = listening(os.getpid())
        with StagingSession(config) as peer:
            assert peer.path == "one-sided"
            for ports in (
                listening(server.process.pid),
                listening(server.agent_pid()),
                listening(os.getpid()) - before,
            ):
                assert {host.removeprefix("::ffff:") for host, _ in ports} == {"127.0.0.1"}


def test_shared_memory_through_ucx_brings_the_same_bytes(tmp_path: Path) -> None:
    data = random_blocks(18, 8)
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"transport": "shm"}) as server:
        assert stats(server).transport == "shm"
        with session(server, "one-sided", may_write=True) as peer:
            assert peer.path_reason == "this session is forced to be remote; over shm"
            statuses, out = fetch(peer, stage(peer, "s", data), 8)
            assert not any(statuses)
            np.testing.assert_array_equal(out, data)


def test_a_service_without_nixl_says_why_and_serves_by_stream(tmp_path: Path) -> None:
    for name in ("nixl_cu12", "nixl_cu13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('hidden by a test')")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"locality": "remote"}, env=env) as server:
        assert stats(server).transport == "none"
        assert "hidden by a test" in stats(server).transport_reason
        assert "hidden by a test" in server.log.read_text()
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="test", may_write=True)
        with StagingSession(config) as peer:
            assert peer.path == "stream"
            assert "hidden by a test" in peer.path_reason
            data = random_blocks(5, 4)
            statuses, out = fetch(peer, stage(peer, "n", data), 4)
            assert not any(statuses)
            np.testing.assert_array_equal(out, data)


def test_a_session_without_nixl_says_why_and_uses_streams(
    server: StagingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("absent_module",))
    nixl.load.cache_clear()
    try:
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="t", may_write=False, locality="remote")
        with StagingSession(config) as peer:
            assert peer.path == "stream"
            assert "absent_module" in peer.path_reason
    finally:
        nixl.load.cache_clear()


def test_with_certificates_bytes_go_by_stream_unless_a_transport_is_named(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    for name, days in (("server", 1), ("peer", 1), ("expired", -1)):
        make_certificate(tmp_path, name, authority, days)
    make_certificate(tmp_path, "stranger", make_certificate(tmp_path, "other"))
    tls = {name: str(path) for name, path in asdict(tls_files(tmp_path, "server")).items()}
    data = random_blocks(19, 4)
    for settings, way, why in (
        ({"locality": "remote"}, "stream", "calls use TLS"),
        ({"locality": "remote", "transport": "tcp"}, "one-sided", "over tcp"),
    ):
        with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging=settings, tls=tls) as server:
            config = SessionConfig(address=server.address, fingerprint=SHAPE, name="tls", may_write=True, timeout_s=5.0)
            with StagingSession(replace(config, tls=tls_files(tmp_path, "peer"))) as peer:
                assert peer.path == way
                assert why in peer.path_reason
                statuses, out = fetch(peer, stage(peer, "c", data), 4)
                assert not any(statuses)
                np.testing.assert_array_equal(out, data)
            for refused in (None, tls_files(tmp_path, "expired"), tls_files(tmp_path, "stranger")):
                with pytest.raises(PeerUnavailableError):
                    StagingSession(replace(config, tls=refused))


def test_a_peer_for_streams_cannot_attach_nor_make_a_process_start(server: StagingProcess) -> None:
    import grpc

    process = psutil.Process(server.process.pid)
    os.kill(server.agent_pid(), signal.SIGKILL)
    until(lambda: process.children() == [])
    with session(server, "stream") as peer, grpc.insecure_channel(server.address) as channel:
        peer_id = pb.RegisterPeerResponse.FromString(bytes.fromhex(peer.token)).peer_id
        for who, name in ((peer_id, "UnsupportedError"), ("unknown", "LeaseExpiredError")):
            call = staging_pb2_grpc.StagingStub(channel).Attach(pb.AttachRequest(peer_id=who), timeout=10)
            with pytest.raises(grpc.RpcError):
                next(iter(call))
            assert ("oasiskv-error", name) in list(call.trailing_metadata())
    assert process.children() == []
    until(lambda: stats(server).num_links == 0)


@pytest.mark.parametrize("way", WAYS)
def test_a_block_whose_bytes_were_changed_is_corrupt_and_the_others_are_right(server: StagingProcess, way: str) -> None:
    data = random_blocks(9, 6)
    expected = [0, 0, FetchStatus.CORRUPT, 0, FetchStatus.CORRUPT, 0]
    with session(server, "mapped", may_write=True) as vandal, session(server, way) as reader:
        before = stats(server).num_corrupt_blocks_total
        lease = stage(vandal, f"c-{way}", data)
        assert lease.block_ids is not None
        vandal._moves._pool.parts[lease.block_ids[[2, 4]], 1, 100] ^= 1  # type: ignore[union-attr]
        taken = reader.lease(keys(f"c-{way}", 6)).result()
        for _ in range(2):  # the second time the service knows
            statuses, out = fetch(reader, taken, 6)
            assert statuses == expected
            np.testing.assert_array_equal(out[[0, 1, 3, 5]], data[[0, 1, 3, 5]])
        assert reader.num_retried_blocks == (0 if way == "stream" else 4)
        assert stats(server).num_corrupt_blocks_total == before + 2
        assert reader.lease(keys(f"c-{way}", 6)).result().num_blocks == 2, "nobody is sent to it again"


def test_what_was_not_written_whole_is_not_sealed(server: StagingProcess) -> None:
    data = random_blocks(10, 2)
    with session(server, "one-sided", may_write=True) as writer:
        writer.register(data)
        lease = writer.allocate(2).result()
        writer.put(lease, [0, 1], 0, data).result()
        assert lease.sums is not None
        lease.sums[1, 2] += np.uint64(1)
        with pytest.raises(CorruptBlockError, match="part 2 of block 1"):
            writer.seal(lease, [0, 1], keys("x", 2)).result()
        with pytest.raises(BlockNotFoundError):
            writer.lease(keys("x", 1)).result()


@pytest.mark.parametrize("how", ["mapped", "one-sided", "asked for"])
def test_a_block_of_another_generation_is_not_taken_though_its_bytes_are_right(
    server: StagingProcess, how: str
) -> None:
    data = random_blocks(13, 6)
    with session(server, "mapped" if how == "mapped" else "one-sided", may_write=True) as peer:
        if how == "asked for":  # as where a device cannot register memory to read only
            peer._moves._pool._generations_address = np.uint64(0)  # type: ignore[union-attr]
        lease = stage(peer, f"g-{how}", data)
        statuses, out = fetch(peer, lease, 6)
        assert not any(statuses)
        np.testing.assert_array_equal(out, data)
        assert peer.num_retried_blocks == 0
        assert lease.columns is not None
        lease.columns.generations[2] -= np.uint64(1)
        assert fetch(peer, lease, 6)[0] == [0] * 6
        assert peer.num_retried_blocks == 1, "the service has the last word"


def test_ranks_of_one_peer_fill_one_lease_together(server: StagingProcess) -> None:
    data = random_blocks(14, 3)
    halves = [np.ascontiguousarray(data[:, :2]), np.ascontiguousarray(data[:, 2:])]
    with session(server, "one-sided", may_write=True) as first:
        config = SessionConfig(
            address=server.address, fingerprint=SHAPE, name="rank 1", may_write=True, locality="remote"
        )
        with StagingSession(config, token=first.token) as second:
            lease = first.allocate(3).result()
            joined = second.join(lease.token)
            for rank, (peer, its) in enumerate(((first, lease), (second, joined))):
                peer.register(halves[rank])
                peer.put(its, range(3), 2 * rank, halves[rank]).result()
            assert lease.sums is not None
            assert joined.sums is not None
            first.seal(lease, range(3), keys("j", 3), lease.sums + joined.sums).result()
        statuses, out = fetch(first, lease, 3)
        assert not any(statuses)
        np.testing.assert_array_equal(out, data)


def test_a_handle_passes_a_prompt_on_and_its_first_lease_ends(server: StagingProcess) -> None:
    data = random_blocks(15, 3)
    with session(server, "one-sided", may_write=True) as prefill, session(server, "mapped") as decode:
        lease = stage(prefill, "h", data)
        handle = prefill.hand_off(lease).result()
        with pytest.raises(LeaseExpiredError):
            prefill.hand_off(lease).result()
        statuses, out = fetch(decode, decode.accept(handle).result(), 3)
        assert not any(statuses)
        np.testing.assert_array_equal(out, data)


def test_leases_are_renewed_while_the_session_lives(server: StagingProcess) -> None:
    data = random_blocks(16, 2)
    with session(server, "stream", may_write=True, ttl_s=2.0) as peer:  # which needs the lease for each part
        lease = stage(peer, "o", data)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            assert fetch(peer, lease, 2)[0] == [0, 0]
            time.sleep(0.1)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_session_calls_for_a_request_is_traced_below_it_and_renewing_is_not(
    server: StagingProcess, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, list[dict[str, str]]] = {}
    is_renewed = threading.Event()
    call, get = StagingClient.call, StagingClient.get

    def note(name: str) -> None:
        sent.setdefault(name, []).append(dict(context_metadata()))

    async def noted_call(client: StagingClient, method: Any, request: Any, **options: Any) -> Any:
        note(method._method.decode().rpartition("/")[2])
        if isinstance(request, pb.RenewRequest):
            is_renewed.set()
        return await call(client, method, request, **options)

    def noted_get(client: StagingClient, *arguments: Any) -> Any:
        note("Get")
        return get(client, *arguments)

    monkeypatch.setattr(StagingClient, "call", noted_call)
    monkeypatch.setattr(StagingClient, "get", noted_get)
    data = random_blocks(9, 4)
    parent = trace.SpanContext(trace_id=2**127 + 7, span_id=11, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(parent)), session(server, way, may_write=True, ttl_s=0.6) as peer:
        lease = stage(peer, f"t-{way}", data)
        statuses, _ = fetch(peer, lease, 4)
        assert not any(statuses)
        peer.release(lease).result()
        assert is_renewed.wait(20)
    expected = {"traceparent": f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01"}
    renewals = sent.pop("Renew")
    assert renewals == [{}] * len(renewals)
    assert sent.keys() >= {"RegisterPeer", "Allocate", "Seal", "Release", *MOVES[way]}
    assert [(name, found) for name, calls in sent.items() for found in calls if found != expected] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_call_with_a_wrong_shape_is_refused_by_name_and_writes_nothing(server: StagingProcess, way: str) -> None:
    with session(server, way, may_write=True) as peer:
        lease = stage(peer, f"e-{way}", random_blocks(17, 2))
        out = np.zeros((2, 1, SHAPE.part_bytes), np.uint8)
        peer.register(out)
        for indices, first_part, where, name in (
            ([0, 2], 0, out, "block_indices"),
            ([0, -1], 0, out, "block_indices"),
            ([0], 0, out, "block_indices"),
            ([0, 1], SHAPE.num_parts, out, "first_part"),
            ([0, 1], 0, out[:, :, :-1], "data"),
        ):
            with pytest.raises(InvalidRequestError, match=rf"^{name}"):
                peer.fetch(lease, indices, first_part, where).result()
        if way == "one-sided":
            with pytest.raises(InvalidRequestError, match=r"^buffer"):
                peer.fetch(lease, [0, 1], 0, np.zeros_like(out)).result()
            fresh = peer.allocate(2).result()
            with pytest.raises(InvalidRequestError, match=r"^buffer"):
                peer.put(fresh, [0, 1], 0, np.ones_like(out)).result()
            assert fresh.sums is not None
            assert not fresh.sums.any()
            peer.release(fresh)
        assert not out.any()
        with pytest.raises(InvalidRequestError, match=r"^buffer"):
            peer.register(out[:, :, ::2])


@pytest.mark.timeout(240)
def test_the_tier_is_measured_by_the_paths_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "NUM_LEASES", 10)
    assert main(["bench", "staging", "--paths", "UCX fog", "--out", str(tmp_path)]) == 2
    assert "error: paths: expected one of mapped, UCX shared memory" in capsys.readouterr().err
    if not torch.cuda.is_available():
        for memory in ("pinned", "gpu"):
            assert main(["bench", "staging", "--memory", memory, "--out", str(tmp_path)]) == 2
            assert f"error: memory: expected a CUDA device for {memory}" in capsys.readouterr().err
    arguments = ["--pool-bytes", str(2**23), "--repeats", "1", "--block-sizes", "16", "--out", str(tmp_path)]
    assert main(["bench", "staging", *arguments, "--paths", "gRPC stream", "UCX TCP", "SSD"]) == 0
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["command"].startswith("oasiskv bench staging")
    rows = found["results"]
    assert {row["path"] for row in rows} == {"gRPC stream", "UCX TCP", "SSD", "calls, 10 leases"}
    assert {row["part_KiB"] for row in rows if "part_KiB" in row} == {64}
    compared = [row for row in rows if row["op"] in ("read", "write") and row["bytes"] != "one part"]
    assert len(compared) == 4 + 4 + 2
    plain = {(row["op"], row["bytes"]): row["plain_gb_per_s"] for row in compared if row["path"] == "UCX TCP"}
    for row in compared:
        assert row["gb_per_s"] > 0
        assert row["nixl_share" if row["path"] == "gRPC stream" else "share"] > 0
        if row["path"] == "gRPC stream":
            assert row["nixl_gb_per_s"] == plain[row["op"], row["bytes"]]
    assert [row["op"] for row in rows if "p99_ms" in row] == [
        "renew all",
        "locate 64",
        "lease 64 and release",
        "describe 64",
    ]


@pytest.mark.timeout(240)
def test_what_a_host_lacks_is_named_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "NUM_LEASES", 10)
    monkeypatch.setattr(nixl, "MODULES", ("nixl_that_is_absent",))
    nixl.load.cache_clear()
    arguments = ["--pool-bytes", str(2**22), "--repeats", "1", "--block-sizes", "16", "--out", str(tmp_path)]
    try:
        assert main(["bench", "staging", *arguments, "--paths", "UCX TCP", "mapped", "SSD"]) == 0
    finally:
        nixl.load.cache_clear()
    rows = json.loads(next(tmp_path.iterdir()).read_text())["results"]
    missing = {row["path"]: row["not_measured"] for row in rows if "not_measured" in row}
    assert missing.keys() == {"UCX TCP", "SSD, plain copy"}
    assert missing["UCX TCP"].startswith("path: expected one-sided, got stream, since ")
    assert all("nixl_that_is_absent" in reason for reason in missing.values())
    measured = {(row["path"], row["op"], row.get("bytes")) for row in rows if row.get("gb_per_s")}
    assert measured >= {(path, op, "all layers") for path in ("mapped", "SSD") for op in ("read", "write")}
    assert not any("share" in row for row in rows if row["path"] == "SSD")
