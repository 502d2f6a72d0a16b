"""The load generator: closed and open loops over keep-alive connections. It handles requests as bytes, without knowledge of their content.

It is not a general HTTP client, because of timing and cost: an open loop must record when a request was due instead of when it was sent. It
shares two cores with the service under test, so a request may cost microseconds, not hundreds of them like with a general client.
"""
