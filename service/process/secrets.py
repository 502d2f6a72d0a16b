"""Secrets: what the service reads from files that hold keys, at the start and again on SIGHUP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from service.api_keys import ApiKeys
from service.process.tls import Certificate


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

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What connections are made with."""
        return None if self.certificate is None else self.certificate.context

    def reload(self) -> None:
        """Reads all files again; what is wrong stays as it was, and the log says so."""
        for each in (self.keys, self.admin_keys, self.certificate):
            if each is not None:
                each.reload()
