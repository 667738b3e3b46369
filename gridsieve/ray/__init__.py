"""Asks about more clips than one machine answers, by Ray Data, which moves URIs to workers and rows away from them.

    import gridsieve.ray

    gridsieve.ray.run(uris, "s3://bucket/answers", "What happens?", services="gpu-1:50053", pruning_rate=0.75)

    uris ─▶ without those of the output ─▶ workers read and ask ─▶ rows ─▶ Parquet

Workers are clients of services that run, or start services of their own. The cluster is Ray's business: a job runs in
the one that `ray.init` has found.
"""

try:
    from gridsieve.ray.job import Asking as Asking
    from gridsieve.ray.job import answers as answers
    from gridsieve.ray.job import run as run
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'gridsieve[ray]'", name=error.name) from error
