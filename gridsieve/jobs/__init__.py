"""Jobs: many requests, each of which becomes a row. `gridsieve batch` and the gateway's `/v1/batches` run them.

    requests ── Line ──> Job ── ask ──> Reply ── row ──> output

It knows neither the services nor who asks: `http` sends a line to a gateway, the gateway hands it to itself.
"""
