import subprocess
import sys

REFUSE_HEAVY_IMPORTS = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "vllm", "transformers", "grpc", "kopf"}:
            raise ImportError(f"core must not import {name}")

sys.meta_path.insert(0, Refuse())
import oasiskv.core
names = ["oasiskv.core", *(m.name for m in pkgutil.walk_packages(oasiskv.core.__path__, "oasiskv.core."))]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_every_module_of_core_imports_where_torch_and_vllm_are_refused() -> None:
    result = subprocess.run([sys.executable, "-c", REFUSE_HEAVY_IMPORTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 2
