"""`python -m oasiskv.operator.upgrade`: bring the definitions in the cluster to this version.

Helm installs what lies in `crds/` and never touches it again. The chart's hook runs this before each upgrade, with the
right to change these definitions and no other, in a pod of the version that is about to be installed.
"""

import argparse
import json
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator.crds import KINDS, VERSION, definition

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MANAGER = "helm"
"""That of helm 4, whose `helm install` applies definitions too: under another name, it would meet a conflict."""
TIMEOUT_S = 30.0

Call = Callable[[str, str, Mapping[str, Any] | None], dict[str, Any] | None]
"""Method, path and body to the answer of the API server; None where there is no such object."""


def upgrade(call: Call) -> list[str]:
    """Apply every definition that the cluster has in an older version; return what was done, a line each.

    A newer one stays: this version's operator reads what it knows, and objects would lose the fields that it does not.

    Raises:
        ConfigError: A definition is not there, or the API server refuses.
    """
    done = []
    for kind in KINDS:
        wanted = definition(kind)
        path = f"{PATH}/{wanted['metadata']['name']}"
        found = call("GET", path, None)
        if found is None:
            raise ConfigError(
                f"{wanted['metadata']['name']}: expected to be installed, got none;"
                " `helm show crds CHART | kubectl apply --server-side -f -` installs it"
            )
        there = found["metadata"].get("annotations", {}).get(VERSION, "")
        ours = wanted["metadata"]["annotations"][VERSION]
        if _order(there) > _order(ours):
            done.append(f"{kind.plural}: stays at {there}, which is newer than {ours}")
            continue
        call("PATCH", f"{path}?fieldManager={MANAGER}&force=true", wanted)
        done.append(f"{kind.plural}: {there or 'a version that it does not say'} -> {ours}")
    return done


def api_server(account: Path) -> Call:
    """Return calls to the API server of the cluster that this pod runs in.

    Args:
        account: Folder with the token of a service account and the certificate of the cluster.

    Raises:
        ConfigError: This is no pod, or one without a service account.
    """
    try:
        base = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
        token = (account / "token").read_text().strip()
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (KeyError, OSError) as cause:
        raise ConfigError(f"upgrade: expected to run in a pod with a service account, got no {cause}") from cause

    def call(method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any] | None:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/apply-patch+yaml"}
        request = urllib.request.Request(base + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as cause:
            with cause:
                if cause.code == 404:
                    return None
                said = json.load(cause).get("message", cause.reason)
            raise ConfigError(f"{method} {path}: expected to be done, got {cause.code}: {said}") from cause
        except OSError as cause:
            raise ConfigError(f"{method} {path}: expected an answer of {base}, got {cause}") from cause

    return call


def main(arguments: list[str] | None = None) -> int:
    """Upgrade the definitions; 1 and a line that says why if that fails."""
    parser = argparse.ArgumentParser(prog="python -m oasiskv.operator.upgrade", description=__doc__)
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="folder of the service account (%(default)s)")
    account = parser.parse_args(arguments).account
    try:
        print("\n".join(upgrade(api_server(account))))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


if __name__ == "__main__":
    sys.exit(main())
