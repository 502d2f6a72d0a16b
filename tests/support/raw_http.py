"""Unusual and invalid HTTP/1.1 messages, each with the expected statuses, and a Hypothesis strategy that generates more."""

import gzip
import zlib

from hypothesis import strategies as st

from support.http_messages import BODY, CHUNKED, END, H2C, LAST_CHUNK, LINES, chunk, get, head, post

CLEAN = get()
CHUNKS = chunk(BODY) + LAST_CHUNK
SMUGGLED = get(b"x-request-id: smuggled", start=b"GET /info HTTP/1.1")
BOMB = gzip.compress(b'{"inputs": "' + b"a" * 10_000_000 + b'"}', 9)
UPGRADES = {
    "h2c": H2C,
    "websocket": (
        b"connection: upgrade",
        b"upgrade: websocket",
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        b"sec-websocket-version: 13",
    ),
    "tls": (b"connection: upgrade", b"upgrade: TLS/1.2"),
}
# name -> the bytes of a connection, and the statuses of the answers; if there are two, a CLEAN at the end is sent after the first answer
CORPUS: dict[str, tuple[bytes, list[int]]] = {
    # length of the body
    "two lengths": (head(b"content-length: 17", b"content-length: 0") + BODY + CLEAN, [400]),
    "one length twice": (head(b"content-length: 17", b"content-length: 17") + BODY + CLEAN, [400]),
    "lengths in a list": (head(b"content-length: 17, 17") + BODY + CLEAN, [400]),
    "length and chunks": (head(b"content-length: 5", CHUNKED) + LAST_CHUNK + SMUGGLED, [400]),
    "chunks and length": (head(CHUNKED, b"content-length: 5") + LAST_CHUNK + SMUGGLED, [400]),
    "an unknown transfer coding": (head(b"transfer-encoding: xchunked") + CHUNKS, [400]),
    "chunked before another coding": (head(b"transfer-encoding: chunked, identity") + CHUNKS, [400]),
    "chunks of a compressed body": (head(b"transfer-encoding: gzip, chunked") + CHUNKS + CLEAN, [415, 200]),
    "chunked and then identity": (head(CHUNKED, b"transfer-encoding: identity") + LAST_CHUNK, [400]),
    "a space before the colon": (head(b"transfer-encoding : chunked") + CHUNKS, [400]),
    "folded chunks": (head(b"transfer-encoding:\r\n chunked") + CHUNKS, [400]),
    "a vertical tab": (head(b"transfer-encoding: \x0bchunked") + CHUNKS, [400]),
    **{
        f"length `{value}`": (head(b"content-length: " + value.encode("latin-1")) + BODY + CLEAN, [400])
        for value in ("+17", "-1", "0x11", "", "17 17", "1_7", "1e1", "99999999999999999999999", "²", "17;")
    },
    "a length with zeros": (head(b"content-length: 00000000017") + BODY + CLEAN, [200, 200]),
    "a length with 5,000 zeros": (head(b"content-length: %05017d" % 17) + BODY + CLEAN, [200, 200]),
    "a folded length": (head(b"content-length:\r\n 17") + BODY, [400]),
    "a body shorter than its length": (post(length=99), []),
    "a body longer than its length": (post(length=4), [400]),
    "a body that is a request": (post(body=SMUGGLED) + CLEAN, [400, 200]),
    "a GET with a body": (get(b"content-length: 5") + b"hello" + CLEAN, [200, 200]),
    # chunks
    "chunks with extensions and trailers": (
        head(CHUNKED) + b'5;a=b;c="d"\r\n' + BODY[:5] + b"\r\n0c\r\n" + BODY[5:] + b"\r\n0\r\nx: y\r\n\r\n" + CLEAN,
        [200, 200],
    ),
    **{
        f"chunk size `{size.decode('latin-1')}`": (head(CHUNKED) + size + b"\r\n" + BODY + b"\r\n0\r\n\r\n", [400])
        for size in (b"0x11", b"-1", b"+11", b"g", b"", b"11 11", b"fffffffffffffffff", b"\xb2", b"11;\0", b"11;a\n")
    },
    "a chunk longer than its size": (head(CHUNKED) + b"5\r\n" + BODY + b"\r\n0\r\n\r\n", [400]),
    "chunks with bare newlines": (head(CHUNKED) + b"11\n" + BODY + b"\n0\n\n", [400]),
    "chunks without an end": (head(CHUNKED) + chunk(BODY), []),
    "chunks of a byte": (head(CHUNKED) + b"".join(chunk(b"%c" % byte) for byte in BODY) + LAST_CHUNK, [200]),
    # header lines and names
    "bare newlines": (post().replace(b"\r\n", b"\n"), [400]),
    "one bare newline": (get(b"x: y\nx-request-id: z"), [400]),
    "bare returns": (get(b"x: y\rx-request-id: z"), [400]),
    "a folded line": (get(b"x: y\r\n z"), [400]),
    "a line that begins with a space": (b"GET /health HTTP/1.1\r\n host: t\r\n\r\n", [400]),
    "a NUL in a name": (get(b"x\0y: z"), [400]),
    "a NUL in a value": (get(b"x: y\0z"), [400]),
    "a name of Latin-1": (get(b"x\xe9: y"), [400]),
    "a value of Latin-1": (get(b"x: \xe9\xff"), [200]),
    "no name": (get(b": y"), [400]),
    "no colon": (get(b"xy"), [400]),
    "10,000 headers": (get(*[b"a: b"] * 10_000), [431]),
    "a header of a megabyte": (get(b"x: " + b"y" * 1_000_000), [431]),
    "two hosts": (get(b"host: u"), [200]),
    "two types": (post(b"content-type: application/json", LINES), [400]),
    "two encodings": (post(b"content-encoding: gzip", b"content-encoding: identity"), [400]),
    "two deadlines": (post(b"x-request-timeout-ms: 1", b"x-request-timeout-ms: 1000"), [400]),
    "two lengths of the JSON": (
        post(b"inference-header-content-length: 1", b"inference-header-content-length: 2", path=b"/v2/models/classifier/infer"),
        [400],
    ),
    # request line
    "HTTP/0.9": (b"GET /health\r\n\r\n", [400]),
    "HTTP/0.9, only its line": (b"GET /health\r\n", []),
    "HTTP/1.0": (post().replace(b"HTTP/1.1", b"HTTP/1.0"), [200]),
    "JSON Lines over HTTP/1.0": (post(LINES).replace(b"HTTP/1.1", b"HTTP/1.0"), [400]),
    "HTTP/1.2": (get(start=b"GET /health HTTP/1.2"), [400]),
    "HTTP/2": (get(start=b"GET /health HTTP/2.0"), [400]),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), [400]),
    "an absolute URL": (get(start=b"GET http://t/health HTTP/1.1") + CLEAN, [200, 200]),
    "an absolute URL without a path": (get(start=b"GET http://t HTTP/1.1"), [400]),
    "a URL of another scheme": (get(start=b"GET ftp://u/nowhere HTTP/1.1"), [404]),
    "no path": (get(start=b"OPTIONS * HTTP/1.1"), [404]),
    "a fragment": (get(start=b"GET /metrics#x HTTP/1.1"), [400]),
    "a fragment after a query": (get(start=b"GET /metrics?a#/health HTTP/1.1") + CLEAN, [400]),
    "a fragment with an upgrade": (get(*UPGRADES["h2c"], start=b"GET /metrics#x HTTP/1.1"), [400]),
    "an escaped fragment": (get(start=b"GET /metrics%23x HTTP/1.1") + CLEAN, [404, 200]),
    "two slashes": (get(start=b"GET //evil.example/health HTTP/1.1"), [404]),
    "a slash at the end": (get(start=b"GET /health/ HTTP/1.1"), [404]),
    "a path that is not ASCII": (get(start=b"GET /\xc3\xa9 HTTP/1.1"), [400]),
    "a space in a path": (get(start=b"GET /he alth HTTP/1.1"), [400]),
    "bytes in a path": (get(start=b"GET /%00%0d%0aset-cookie:%20a=b%ed%a0%80%zz HTTP/1.1"), [400]),
    "a path out of the folder": (get(start=b"GET /docs/static/..%2f..%2f..%2f..%2fetc/passwd HTTP/1.1"), [400]),
    "a path below a file": (get(start=b"GET /docs/static/swagger-ui.css/%00 HTTP/1.1"), [400]),
    "a path of 30,000 characters": (get(start=b"GET /" + b"x" * 30_000 + b" HTTP/1.1"), [404]),
    "a method in lower case": (get(start=b"get /health HTTP/1.1"), [400]),
    "an unknown method": (get(start=b"BREW /health HTTP/1.1"), [400]),
    "a method of WebDAV": (get(start=b"PROPFIND /health HTTP/1.1") + CLEAN, [405, 200]),
    "a second request": (CLEAN + get(b"x-request-id: smuggled"), [200]),
    "a HEAD": (get(b"x-request-id: head", start=b"HEAD /health HTTP/1.1") + CLEAN, [405, 200]),
    "CONNECT to a host": (get(start=b"CONNECT evil.example:80 HTTP/1.1") + SMUGGLED, [400]),
    "CONNECT to a path": (get(start=b"CONNECT /health HTTP/1.1") + SMUGGLED, [400]),
    # expectations, upgrades and encodings
    "an expectation of 100 Continue": (post(b"expect: 100-continue") + CLEAN, [200, 200]),
    "an expectation at an unknown path": (post(b"expect: 100-continue", path=b"/nowhere") + CLEAN, [404, 200]),
    "an unknown expectation": (post(b"expect: 200-ok") + CLEAN, [200, 200]),
    **{f"an upgrade to {name}": (get(*headers) + CLEAN, [200, 200]) for name, headers in UPGRADES.items()},
    **{f"a post with an upgrade to {name}": (post(*headers) + CLEAN, [200, 200]) for name, headers in UPGRADES.items()},
    **{f"an upgrade to {name} that closes": (get(b"connection: close", *headers) + CLEAN, [200]) for name, headers in UPGRADES.items()},
    **{
        f"a post with an upgrade to {name} that closes": (post(b"connection: close", *headers) + CLEAN, [200])
        for name, headers in UPGRADES.items()
    },
    **{f"a smuggled body of {name}": (post(*headers, body=SMUGGLED) + CLEAN, [400, 200]) for name, headers in UPGRADES.items()},
    "chunks with an upgrade": (
        head(*UPGRADES["h2c"], CHUNKED) + CHUNKS + CLEAN,
        [200, 200],
    ),
    **{
        f"content encoding `{coding}`": (post(b"content-encoding: " + coding.encode(), body=body) + CLEAN, [415, 200])
        for coding, body in {
            "gzip": gzip.compress(BODY),
            "x-gzip": BOMB,
            "GZip": BOMB,
            "deflate": zlib.compress(BODY),
            "br": b"\x0b\x08\x80",
            "zstd": b"\x28\xb5\x2f\xfd",
            "compress": BODY,
            "identity, gzip": BODY,
            "nonsense": BODY,
        }.items()
    },
    "not encoded": (post(b"content-encoding: Identity") + CLEAN, [200, 200]),
    "a request after connection: close": (post(b"connection: close") + SMUGGLED, [200]),
    # not HTTP
    "all bytes": (bytes(range(256)), [400]),
    "zeros": (bytes(1000), [400]),
    "a TLS hello": (bytes.fromhex("16030100c8010000c40303") + bytes(200), [400]),
    "an SSH hello": (b"SSH-2.0-OpenSSH_9.9\r\n", [400]),
    "empty lines": (b"\r\n\r\n\r\n" + CLEAN, [200]),
    "nothing": (b"", []),
    "half a line": (b"GET /hea", []),
}

# no HEAD: after a changed byte, the parser of the response could no longer know that the response has no body
METHODS = (b"GET", b"POST", b"POST", b"POST", b"DELETE", b"PUT", b"OPTIONS", b"CONNECT", b"TRACE", b"get", b"PRI", b"", b"G\0T")
TARGETS = (
    b"/health",
    b"/classify",
    b"/classify",
    b"/models/classifier",
    b"/embed",
    b"/nowhere",
    b"*",
    b"//",
    b"http://t/info",
    b"t:80",
    b"/%00",
    b"?",
    b"",
)
VERSIONS = (b"HTTP/1.1",) * 8 + (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 ", b"http/1.1", b"HTTP/11", b"")
HEADERS = (
    b"connection: close",
    b"connection: keep-alive",
    b"connection: upgrade",
    b"upgrade: h2c",
    b"upgrade: websocket",
    b"expect: 100-continue",
    b"content-encoding: gzip",
    b"x-request-timeout-ms: 1e9",
    b"x-request-timeout-ms: 5000",
    b"authorization: Bearer \xff",
    b"host: u",
    b" folded",
    b"x\0: y",
    b"x : y",
    b"content-type: text/plain",
    b"range: bytes=0-",
    b"origin: http://evil.example",
)
FRAMINGS = (
    *(b"content-length: %d",) * 6,
    b"content-length: 0",
    b"content-length: 5",
    b"content-length: 99999999999",
    b"content-length: %d\r\ncontent-length: %d",
    b"content-length: 5\r\ntransfer-encoding: chunked",
    b"transfer-encoding: chunked",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
    b"transfer-encoding:\tchunked",
    b"x: y",
)
BODIES = (BODY, BODY, b"", b'{"inputs":["bad","good"]}', SMUGGLED, CHUNKS, LAST_CHUNK + SMUGGLED, b"\xff\0")


@st.composite
def _messages(draw: st.DrawFn, index: int) -> bytes:
    """Returns a message, valid or not, whose `x-request-id` has its index on the connection."""
    body = draw(st.sampled_from(BODIES))
    method = draw(st.sampled_from(METHODS))
    framing = draw(st.sampled_from(FRAMINGS)).replace(b"%d", b"%d" % len(body))
    if framing.startswith(b"transfer") and draw(st.booleans()):
        body = (chunk(body) if body else b"") + LAST_CHUNK
    name = b"sent-%d" % index
    lines = [
        b" ".join([method, draw(st.sampled_from(TARGETS)), draw(st.sampled_from(VERSIONS))]),
        b"host: t",
        b"x-request-id: " + name,
        *draw(st.lists(st.sampled_from(HEADERS), max_size=3)),
        framing,
    ]
    return b"\r\n".join(lines) + END + body


@st.composite
def connections(draw: st.DrawFn) -> bytes:
    """Returns the bytes of one connection: one to four messages, sometimes with a few bytes removed or inserted."""
    messages = b"".join(draw(_messages(index)) for index in range(draw(st.integers(1, 4))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        start = draw(st.integers(0, len(messages)))
        messages = (
            messages[:start]
            + draw(st.sampled_from([b"", b"\n", b"\r", b"\r\n\r\n", b"\0", b"\xff", b" ", b":"]))
            + messages[start + draw(st.integers(0, 3)) :]
        )
    return messages
