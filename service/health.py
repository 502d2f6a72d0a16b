"""Checks whether the service with the same settings on this machine is ready, for containers without an HTTP client."""

import http.client
import ssl
from http import HTTPStatus

from bertserve.service.errors import StartError
from bertserve.service.settings import Settings, to_address


def check_readiness(settings: Settings) -> str:
    """Returns a sentence about the service's state.

    Raises:
        StartError: The service does not answer, or is not ready.
    """
    # a service that listens on all addresses is reached at 0.0.0.0 or :: too
    host, address = settings.host, to_address(settings.host, settings.port)
    connection: http.client.HTTPConnection
    if settings.tls_cert is None:
        connection = http.client.HTTPConnection(host, settings.port, timeout=2)
    else:
        context = ssl.create_default_context()  # the certificate is not checked, because it names the callers' host, not this address
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, settings.port, timeout=2, context=context)
    try:
        connection.request("GET", "/health/ready")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise StartError(
            f"nothing answers on {address} ({str(error) or type(error).__name__}); start the service, or check its log."
        ) from error
    finally:
        connection.close()
    if status == HTTPStatus.UNAUTHORIZED and not settings.public_health:
        return f"{address} answers, but --no-public-health hides whether it is ready."
    if status != HTTPStatus.OK:
        raise StartError(f"the service on {address} is not ready (status {status}).")
    return f"{address} is ready."
