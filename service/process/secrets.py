"""Secrets: what the service reads from files that hold keys, at the start and again on SIGHUP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from bertserve.service.api_keys import ApiKeys
from bertserve.service.process.tls import Certificate
from bertserve.service.settings import Settings


@dataclass(frozen=True)
class Secrets:
    """What lets callers in, and what the service shows them.

    Attributes:
        keys: Of callers; None lets everyone in.
        admin_keys: Of those who may change models; None lets nobody.
        certificate: For TLS; None speaks HTTP.
    """

    keys: ApiKeys | None
    admin_keys: ApiKeys | None
    certificate: Certificate | None

    @classmethod
    def read(cls, settings: Settings) -> Secrets:
        """Reads the files that settings name.

        Raises:
            SettingsError: A file cannot be read, or does not hold what it should.
        """
        keys = None if settings.api_key_file is None else ApiKeys(settings.api_key_file)
        admin_keys = None if settings.admin_key_file is None else ApiKeys(settings.admin_key_file, flag="--admin-key-file")
        certificate = None if settings.tls_cert is None or settings.tls_key is None else Certificate(settings.tls_cert, settings.tls_key)
        return cls(keys, admin_keys, certificate)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What connections are made with."""
        return None if self.certificate is None else self.certificate.context

    def reload(self) -> None:
        """Reads all files again; what is wrong stays as it was, and the log says so."""
        for each in (self.keys, self.admin_keys, self.certificate):
            if each is not None:
                each.reload()
