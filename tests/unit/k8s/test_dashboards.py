"""Dashboards and alerts ask for metrics that our processes show, by labels that these have."""

import asyncio
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.operator import process
from oasiskv.operator.metrics import Metrics
from oasiskv.services.decode.metrics import DecodeCollector
from oasiskv.services.prefill.metrics import PrefillCollector
from oasiskv.services.prefill.service import Counts
from oasiskv.services.rpc.metrics import ServerMetrics
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.data_plane import DataPlane
from oasiskv.services.staging.directory import DirectoryConfig
from oasiskv.services.staging.disk_file import ALIGNMENT, DiskConfig, DiskFile, slot_bytes
from oasiskv.services.staging.fabric import Transport
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.metrics import StagingCollector
from oasiskv.services.staging.service import StagingService

pytest.importorskip("vllm", reason="vLLM shows some of the metrics")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports warn
    from vllm.v1.metrics import loggers

    from oasiskv.engine.vllm.stats import COUNTERS, GAUGES

CHART = Path(__file__).parents[3] / "helm/oasiskv"
SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LIMITS = LeaseConfig(num_blocks=4, max_blocks_per_peer=4)
OF_PROMETHEUS = {"namespace", "job", "pod", "le"}
OF_VLLM = {"model_name", "engine"}
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))


def labels_by_name(families: Iterable[Metric]) -> dict[str, set[str]]:
    made: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            made.setdefault(sample.name, set()).update(sample.labels)
    return made


def of_engines() -> dict[str, set[str]]:
    ours = [f"oasiskv_{metric}_total" for metric, _ in COUNTERS.values()] + [f"oasiskv_{name}" for name in GAUGES]
    assert loggers.__file__ is not None
    theirs = re.findall(r'name="(vllm:\w+)"', Path(loggers.__file__).read_text())
    assert theirs
    return dict.fromkeys([*ours, *theirs], OF_VLLM)


def of_calls() -> dict[str, set[str]]:
    metrics = ServerMetrics()
    metrics.count("/oasiskv.staging.v1.Staging/Find", "ok", 0.1)
    registry: CollectorRegistry = metrics._registry
    return labels_by_name(registry.collect())


def of_staging(folder: Path) -> dict[str, set[str]]:
    disk = DiskConfig(folder=str(folder), max_bytes=ALIGNMENT + 8 * slot_bytes(SHAPE), use_direct_io=False)
    directory = DirectoryConfig(url="redis://127.0.0.1:1", address="here:1")
    config = StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True, directory=directory, disk=disk)

    memory = StagingMemory(SHAPE, LIMITS.num_blocks)
    file = DiskFile.open(disk, SHAPE)
    try:
        data_plane = DataPlane(Transport(name="tcp", reason="a test says so"), memory)
        return collected(lambda: StagingCollector(StagingService(config, memory, disk_file=file), data_plane))
    finally:
        file.close()
        memory.close()


def of_prefill() -> dict[str, set[str]]:
    counts = Counts()
    service = SimpleNamespace(is_ready=True, is_draining=False, num_requests=0, num_waiting_tokens=0, counts=counts)
    config = SimpleNamespace(revision="", fingerprint=SHAPE)
    return collected(lambda: PrefillCollector(cast("Any", config), cast("Any", service)))


def of_decode() -> dict[str, set[str]]:
    service = SimpleNamespace(is_ready=True, is_draining=False, num_requests=0)
    peers = SimpleNamespace(all=[], checks={"ok": 1})
    router = SimpleNamespace(peers=peers, num_leases=0, outcomes={}, choices=Counter(), errors={"InternalError": 1})
    config = SimpleNamespace(revision="", fingerprint=SHAPE)
    return collected(lambda: DecodeCollector(cast("Any", config), cast("Any", service), cast("Any", router)))


def collected(make: Callable[[], Collector]) -> dict[str, set[str]]:
    async def read() -> list[Metric]:
        collector = make()
        return await asyncio.to_thread(lambda: list(collector.collect()))

    return labels_by_name(asyncio.run(read()))


def of_operator() -> dict[str, set[str]]:
    metrics = Metrics()
    metrics.answered("get", 200)
    metrics.writes.labels("apply", "Deployment").inc()
    metrics.reconcile_s.labels("done").observe(1)
    metrics.says(("llm", "chat"), [cast("Any", SimpleNamespace(type="Ready", status="True"))])
    # What is asked of watches is there once a process runs.
    asked = re.findall(r'show\(\s*"(\w+)"', Path(process.__file__).read_text())
    assert asked
    return {name: {"kind"} for name in asked} | labels_by_name(metrics.registry.collect())


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    staging = of_staging(tmp_path_factory.mktemp("disk"))
    return of_engines() | of_calls() | staging | of_prefill() | of_decode() | of_operator()


def expressions(of: Any) -> Iterator[str]:
    if isinstance(of, Mapping):
        for name, each in of.items():
            if name == "expr":
                yield each
            else:
                yield from expressions(each)
    elif isinstance(of, list):
        for each in of:
            yield from expressions(each)


def questions(text: str) -> tuple[set[str], set[str]]:
    """Return the names of metrics and of labels in a query."""
    names: set[str] = set()
    labels: set[str] = set()

    def visit(part: Any) -> None:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            labels.update(part.modifier.labels)
        if isinstance(part, promql_parser.VectorSelector):
            assert part.name is not None, text
            names.add(part.name)
            labels.update(matcher.name for matcher in part.matchers.matchers)
        for child in ("expr", "lhs", "rhs", "vector_selector"):
            if hasattr(part, child):
                visit(getattr(part, child))
        for argument in getattr(part, "args", ()):
            visit(argument)

    visit(promql_parser.parse(text.replace("$__rate_interval", "5m")))
    assert names, text
    return names, labels


def check(texts: Iterable[str], shown: Mapping[str, set[str]]) -> None:
    num_checked = 0
    for text in texts:
        names, labels = questions(text)
        assert names <= shown.keys(), f"{sorted(names - shown.keys())}: shown by no process, asked for by {text}"
        known = OF_PROMETHEUS.union(*(shown[name] for name in names))
        assert labels <= known, f"{sorted(labels - known)}: no label of {sorted(names)}"
        num_checked += 1
    assert num_checked


def test_a_query_is_taken_apart() -> None:
    query = 'histogram_quantile(0.9, sum by (le, a) (rate(x{b="c"}[$__rate_interval]))) / (-y > 0)'
    assert questions(query) == ({"x", "y"}, {"le", "a", "b"})


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_what_is_shown(path: Path, shown: Mapping[str, set[str]]) -> None:
    dashboard = json.loads(path.read_text())
    check(expressions(dashboard), shown)
    sources = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert {re.sub(r"label_values\((\w+).*", r"\1", source) for source in sources} <= shown.keys()


def test_alerts_ask_for_what_is_shown(shown: Mapping[str, set[str]]) -> None:
    check(expressions(yaml.safe_load((CHART / "alerts.yaml").read_text())), shown)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_legend_names_what_its_query_keeps(path: Path) -> None:
    for panel in json.loads(path.read_text())["panels"]:
        legends = [each["legendFormat"] for each in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
        for target in panel["targets"]:
            kept = re.search(r"by \((.*?)\)", target["expr"])
            assert kept is not None
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set(kept[1].split(", ")), panel["title"]


def test_panels_of_a_dashboard_have_numbers_of_their_own_and_do_not_overlap() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
        assert len(set(places)) == len(places)
        assert all(x + panel["gridPos"]["w"] <= 24 for (x, _), panel in zip(places, panels, strict=True))
