import re
from pathlib import Path

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.core.service_config import read_services

TEXT = """
[engine]
model = "/models/m"
[engine.lookahead]
budget_blocks = 8
[engine.arguments]
max_model_len = 512
[fingerprint]
model_hash = "m"
dtype = "float16"
block_size = 16
num_layers = 3
num_kv_heads = 2
head_dim = 8
[prefill]
address = "127.0.0.1:0"
staging = "127.0.0.1:7411"
[prefill.engine.arguments]
max_num_seqs = 2
[decode]
address = "127.0.0.1:0"
http_address = "127.0.0.1:0"
prefills = ["[::1]:7412", "prefill-1:7412"]
staging = "127.0.0.1:7499"
[decode.engine.lookahead]
host_pool_bytes = "64MiB"
[staging]
anything = "goes"
"""


def test_both_services_get_the_common_engine_and_what_is_their_own() -> None:
    config = read_services(TEXT)
    assert config.prefill is not None
    assert config.decode is not None
    assert config.prefill.engine.model == config.decode.engine.model == "/models/m"
    assert config.prefill.engine.arguments == {"max_model_len": 512, "max_num_seqs": 2}
    assert config.decode.engine.arguments == {"max_model_len": 512}
    assert config.prefill.engine.lookahead.budget_blocks == config.decode.engine.lookahead.budget_blocks == 8
    assert config.prefill.engine.lookahead.host_pool_bytes == 4 * 2**30
    assert config.decode.engine.lookahead.host_pool_bytes == 64 * 2**20
    assert config.prefill.fingerprint == config.decode.fingerprint
    assert config.decode.prefills == ("[::1]:7412", "prefill-1:7412")
    assert config.decode.tls is None


def test_services_may_have_ranks_of_their_own() -> None:
    config = read_services(
        TEXT.replace("[decode.engine.lookahead]", "[decode.engine]\ntp_size = 2\n[decode.engine.lookahead]")
    )
    assert config.prefill is not None
    assert config.decode is not None
    assert (config.prefill.engine.tp_size, config.decode.engine.tp_size) == (None, 2)


def test_a_file_for_one_service_leaves_the_other_out() -> None:
    assert read_services(TEXT[: TEXT.index("[prefill]")]).prefill is None
    alone = read_services(TEXT[: TEXT.index("[decode]")])
    assert alone.decode is None
    assert alone.prefill is not None


def test_tls_holds_for_both_services() -> None:
    config = read_services(TEXT + "[tls]\ncertificate = '/c'\nkey = '/k'\nauthority = '/a'\n")
    assert config.prefill is not None
    assert config.decode is not None
    assert config.prefill.tls == config.decode.tls
    assert config.prefill.tls is not None
    assert config.prefill.tls.key == Path("/k")


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("[prefill]", "[prefil]", "prefil: "),
        ("[prefill]", "[prefill", "config: expected TOML"),
        ("[prefill]", "[prefill]\nstagin = 1", r"prefill\.stagin"),
        ('staging = "127.0.0.1:7411"', "", "prefill: .*staging"),
        ('staging = "127.0.0.1:7411"', 'staging = "here"', r"prefill\.staging"),
        ('staging = "127.0.0.1:7411"', 'staging = "host:x"', r"prefill\.staging"),
        ('staging = "127.0.0.1:7411"', 'staging = "host:65536"', r"prefill\.staging"),
        ("[prefill]", "[prefill]\nmax_requests = 0", r"prefill\.max_requests"),
        ("[prefill]", "[prefill]\nmax_requests = true", r"prefill\.max_requests"),
        ("[prefill]", "[prefill]\nhandle_ttl_s = 0", r"prefill\.handle_ttl_s"),
        ("[prefill]", "[prefill]\nmax_call_s = '1'", r"prefill\.max_call_s"),
        ('http_address = "127.0.0.1:0"', "http_address = 8000", r"decode\.http_address"),
        ('"prefill-1:7412"', '":7412"', r"decode\.prefills"),
        ('["[::1]:7412", "prefill-1:7412"]', '"prefill-1:7412"', r"decode\.prefills"),
        ('staging = "127.0.0.1:7499"', 'staging = "here"', r"decode\.staging"),
        ("[decode]", "[decode]\nlocal_prompt_tokens = -1", r"decode\.local_prompt_tokens"),
        ("[decode]", "[decode]\ndrain_s = -1", r"decode\.drain_s"),
        ("[decode]", "[decode]\nmetrics_address = '9400'", r"decode\.metrics_address"),
        ("[prefill]", "[prefill]\nmetrics_address = 9400", r"prefill\.metrics_address"),
        ("[decode]", "[decode]\noip_address = 'here'", r"decode\.oip_address"),
        ("[decode]", "[decode]\nmodel_name = 7", r"decode\.model_name"),
        ("[decode]", "[decode]\nhttp_arguments = 7", r"decode\.http_arguments"),
        ("[prefill]", "[prefill]\nrevision = 7", r"prefill\.revision"),
        ('model = "/models/m"', "", "engine: .*model"),
        ('model = "/models/m"', "model = 1", r"engine\.model"),
        ('model = "/models/m"', 'model = "m"\narguments = 1', "config: expected TOML"),
        ("max_num_seqs = 2", "dtype = 'float16'", r"engine\.arguments\.dtype: .*fingerprint\.dtype"),
        ("max_num_seqs = 2", "block-size = 16", r"engine\.arguments\.block-size: .*fingerprint\.block_size"),
        ("max_num_seqs = 2", "max-num-seqs = 16", r"engine\.arguments\.max-num-seqs"),
        ("[prefill.engine.arguments]", "[prefill.engine]\narguments = 1", r"prefill\.engine\.arguments"),
        ("max_num_seqs = 2", "tensor_parallel_size = 2", r"engine\.arguments\.tensor_parallel_size: .*engine\.tp_size"),
        ("[engine.lookahead]", "tp_size = 0\n[engine.lookahead]", r"engine\.tp_size: .*got 0"),
        ("[prefill.engine.arguments]", "[x]", "x: "),
        ("budget_blocks = 8", "budget_block = 8", r"engine\.lookahead\.budget_block"),
        ("budget_blocks = 8", "budget_blocks = 0", r"engine\.lookahead\.budget_blocks"),
        ("num_kv_heads = 2", "num_kv_heads = 0", r"fingerprint\.num_kv_heads"),
        ("[staging]", "[tls]\nkey = '/k'\n[staging]", "tls: .*certificate"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(before: str, after: str, name: str) -> None:
    assert before in TEXT
    with pytest.raises(ConfigError, match=f"^{name}"):
        read_services(TEXT.replace(before, after))


def test_the_documented_file_is_accepted() -> None:
    text = (Path(__file__).parents[3] / "docs" / "design" / "0004-prefill-and-decode.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    config = read_services(example)
    assert config.prefill is not None
    assert config.decode is not None
    assert config.decode.engine.lookahead.host_pool_bytes == 100 * 2**30
