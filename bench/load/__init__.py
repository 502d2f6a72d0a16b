"""The load generator: closed and open loops over keep-alive connections. It knows requests as bytes, not what they ask for.

It is our own for its clock and its cost: an open loop must record when a request was due and not when it was sent, and it shares two
cores with the service under test, so a request may cost microseconds and not the hundreds that a general HTTP client takes.
"""
