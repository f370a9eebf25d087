"""Health and metrics over HTTP."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


class Web:
    """Answers `/healthz`, `/readyz` and `/metrics` on each of its addresses.

    Args:
        alive: Returns why the process should be ended; empty if it should not.
        ready: Returns why it does not work; empty if it does.
        registry: The metrics.
    """

    def __init__(self, alive: Callable[[], str], ready: Callable[[], str], registry: CollectorRegistry) -> None:
        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        app = web.Application()
        app.router.add_get("/healthz", _answer(alive))
        app.router.add_get("/readyz", _answer(ready))
        app.router.add_get("/metrics", metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)

    async def start(self, *addresses: str) -> list[str]:
        """Listen on addresses, and return them with the ports that port 0 became."""
        await self._runner.setup()
        for address in dict.fromkeys(addresses):
            host, _, port = address.rpartition(":")
            await web.TCPSite(self._runner, host, int(port)).start()
        return [f"{host}:{port}" for host, port, *_ in self._runner.addresses]

    async def stop(self) -> None:
        """End all connections."""
        await self._runner.cleanup()


def _answer(why_not: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        reason = why_not()
        return web.Response(status=503 if reason else 200, text=(reason or "ok") + "\n")

    return answer
