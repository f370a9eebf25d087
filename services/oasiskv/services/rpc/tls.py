"""Mutual TLS whose files may be replaced at any time; a pair that does not fit together keeps the last good one."""

import logging
import ssl
from collections.abc import Callable
from typing import cast

import grpc

from oasiskv.core.errors import ConfigError
from oasiskv.core.service_config import TlsConfig

logger = logging.getLogger(__name__)


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials:
    """Return credentials that require a certificate of every caller and read the files again when they change.

    Raises:
        ConfigError: The files are absent or do not fit together.
    """
    read = _Reader(config)
    # None for no change is part of gRPC's contract, but not of its stubs.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", read.changed)
    return grpc.dynamic_ssl_server_credentials(read.current, fetch, True)


def channel_credentials(config: TlsConfig) -> grpc.ChannelCredentials:
    """Return credentials of a caller, read once: a new channel reads the files anew.

    Raises:
        ConfigError: The files are absent or do not fit together.
    """
    key, certificate, authority = _read(config)
    return grpc.ssl_channel_credentials(authority, key, certificate)


class _Reader:
    """Remembers which files the current configuration came from."""

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._signature = signature(config)
        self.current = _server_configuration(config)

    def changed(self) -> "grpc.ServerCertificateConfiguration | None":
        """Return the configuration for a new handshake; None where nothing changed."""
        try:
            found = signature(self._config)
            if found == self._signature:
                return None
            self.current = _server_configuration(self._config)
        except ConfigError as error:
            logger.warning("new certificates are not used: %s", error)
            return None
        self._signature = found
        return self.current


def _server_configuration(config: TlsConfig) -> "grpc.ServerCertificateConfiguration":
    key, certificate, authority = _read(config)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _read(config: TlsConfig) -> tuple[bytes, bytes, bytes]:
    try:
        # gRPC would notice a key of another certificate only in the handshake, when the good pair is gone.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.certificate, config.key)
        context.load_verify_locations(config.authority)
        return config.key.read_bytes(), config.certificate.read_bytes(), config.authority.read_bytes()
    except (OSError, ssl.SSLError) as cause:
        raise ConfigError(f"tls: expected a certificate, its key and an authority in PEM, got {cause}") from cause


def signature(config: TlsConfig) -> tuple[tuple[int, int, int], ...]:
    """Return what differs when one of the files was replaced.

    Raises:
        ConfigError: One cannot be read.
    """
    try:
        stats = [path.stat() for path in (config.certificate, config.key, config.authority)]
    except OSError as cause:
        raise ConfigError(f"tls: expected files that can be read, got {cause}") from cause
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)
