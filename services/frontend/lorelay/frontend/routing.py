"""Pick a worker: pure functions over a target and what this frontend has in flight.

Adapter requests go where the adapter is, else to the rendezvous winner, so that every frontend sends one adapter to one
worker.  Base requests take the less loaded of two random workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from lorelay.frontend.catalog import Target
from lorelay.proto.rendezvous import ranked


def pick(target: Target, excluded: Collection[str], load: Callable[[str], int], rng: random.Random) -> str | None:
    """Return the worker that should serve `target`, or None if all of its workers are excluded.

    Args:
        target: What is to be served.
        excluded: Workers that already failed this request.
        load: Requests that this frontend has in flight on a worker.
        rng: Chooses the two base candidates.
    """
    workers = [worker for worker in target.workers if worker not in excluded]
    if not workers:
        return None
    if target.selection is not None:
        order = ranked(target.selection.key, workers)
        return next((worker for worker in order if worker in target.holders), order[0])
    pair = rng.sample(workers, 2) if len(workers) > 1 else workers
    return min(pair, key=load)
