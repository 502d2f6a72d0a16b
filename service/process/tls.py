"""Certificate: what the service shows to clients that come by TLS. It may be read again while connections are open."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from bertserve.service.errors import SettingsError

logger = logging.getLogger("bertserve.tls")


class Certificate:
    """A certificate chain with its key, as files.

    Attributes:
        context: For new connections; TLS 1.2 at least.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        """Reads the files.

        Args:
            chain: The certificate and those between it and its root, as PEM.
            key: Its private key, as PEM, without a password.

        Raises:
            SettingsError: One cannot be read, or they do not belong together.
        """
        self._chain = chain
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load()

    def reload(self) -> None:
        """Reads the files again, for connections from now on; where that fails, logs why and keeps the certificate that there is."""
        try:
            Certificate(self._chain, self._key)  # a context that failed half way would have the one file without the other
            self._load()
        except SettingsError as error:
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.info("the certificate was read again")

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._chain, self._key, password=lambda: "")  # without it OpenSSL asks a terminal
        except OSError as error:  # SSLError is one
            reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
            raise SettingsError(
                f"--tls-cert `{self._chain}` and --tls-key `{self._key}` cannot be used ({reason}); both are PEM files, the key is the "
                "certificate's and has no password."
            ) from error
