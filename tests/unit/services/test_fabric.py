from pathlib import Path

import pytest

from oasiskv.services.staging.fabric import choose


def port(folder: Path, device: str, state: str, link_layer: str) -> None:
    place = folder / device / "ports" / "1"
    place.mkdir(parents=True)
    (place / "state").write_text(f"{state}\n")
    (place / "link_layer").write_text(f"{link_layer}\n")


def test_a_host_without_rdma_uses_tcp(tmp_path: Path) -> None:
    found = choose("auto", infiniband=tmp_path)
    assert (found.name, found.ucx_tls) == ("tcp", "tcp")
    assert found.reason == f"no RDMA port in {tmp_path} is active"


def test_a_port_that_is_down_is_not_used(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "1: DOWN", "InfiniBand")
    assert choose("auto", infiniband=tmp_path).name == "tcp"


@pytest.mark.parametrize(("link_layer", "name"), [("InfiniBand", "infiniband"), ("Ethernet", "roce")])
def test_an_active_port_is_used_and_named(tmp_path: Path, link_layer: str, name: str) -> None:
    port(tmp_path, "mlx5_0", "1: DOWN", "InfiniBand")
    port(tmp_path, "mlx5_1", "4: ACTIVE", link_layer)
    for setting in ("auto", "rdma"):
        found = choose(setting, infiniband=tmp_path)
        assert (found.name, found.reason) == (name, "port 1 of mlx5_1 is active")
        assert found.ucx_tls.startswith("rc,")


@pytest.mark.parametrize("setting", ["tcp", "shm"])
def test_what_the_configuration_names_is_used(tmp_path: Path, setting: str) -> None:
    port(tmp_path, "mlx5_1", "4: ACTIVE", "InfiniBand")
    assert choose(setting, has_tls=True, infiniband=tmp_path).name == setting


def test_rdma_that_is_asked_for_and_not_there_is_none(tmp_path: Path) -> None:
    found = choose("rdma", infiniband=tmp_path)
    assert found.name == "none"
    assert "no port" in found.reason


def test_nothing_goes_past_the_service_in_strict_mode_or_unasked_beside_tls(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_1", "4: ACTIVE", "InfiniBand")
    assert choose("auto", is_strict=True, infiniband=tmp_path).reason == "the service is strict"
    beside_tls = choose("auto", has_tls=True, infiniband=tmp_path)
    assert beside_tls.name == "none"
    assert "neither encrypt nor know who calls" in beside_tls.reason
    assert choose("rdma", has_tls=True, infiniband=tmp_path).name == "infiniband"
    assert choose("none", infiniband=tmp_path).name == "none"
