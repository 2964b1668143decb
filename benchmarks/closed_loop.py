"""Clients that ask an engine again as soon as they have their answer, without HTTP.

Knows requests and counts of tokens; deliberately nothing of what is compared.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence

from serve.catalog import Catalog, Served
from serve.engine.engine import Engine
from serve.engine.job import Event, FailedEvent, Job, LaneKey, Limits, TokenEvent
from serve.engine.sampling import Sampling
from serve.engine.work import Generation, GenerationRequest, Work
from serve.metrics import Metrics

CACHE_BYTES = 1 << 30  # what all rows need at their longest
_SOON_S = 0.01


class ClosedLoop:
    """One client for each entry of `clients`, which are step counts.

    The engine stays between two runs, as that of a server does that has been up for a while.
    """

    def __init__(
        self, served: Served, clients: Sequence[int], prompt: Sequence[int], tokens: int
    ) -> None:
        self._served, self._clients = served, clients
        self._prompt, self._tokens = list(prompt), tokens
        self._counts: Counter[int] = Counter()
        self._jobs: dict[int, Job[Work]] = {}  # by client: what it waits for
        limits = Limits(cache_bytes=CACHE_BYTES, decode_rows=len(clients))
        self._engine = Engine(Catalog([served]), limits, Metrics())
        self._engine.start()
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, warm_s: float, seconds: float) -> dict[int, float]:
        """Tokens a second of each step count, once all have begun."""
        self._stopping = False
        for client in range(len(self._clients)):
            self._ask(client)
        time.sleep(warm_s)
        with self._lock:
            self._counts.clear()
        begun_s = time.perf_counter()
        time.sleep(seconds)
        with self._lock:
            counts, spent_s = dict(self._counts), time.perf_counter() - begun_s
        self._stopping = True
        for job in list(self._jobs.values()):
            self._engine.cancel(job)
        while self._engine.running:
            time.sleep(_SOON_S)
        return {steps: counts.get(steps, 0) / spent_s for steps in set(self._clients)}

    def stop(self) -> None:
        """No run follows."""
        self._engine.stop()

    def _ask(self, client: int) -> None:
        steps = self._clients[client]
        window = self._served.manifest.text_input.max_tokens
        wish = GenerationRequest(
            self._prompt, self._tokens, window, Sampling(temperature=0.0), stream=True
        )

        def deliver(event: Event) -> None:
            if isinstance(event, TokenEvent):
                with self._lock:
                    self._counts[steps] += 1
            elif not self._stopping:
                assert not isinstance(event, FailedEvent), event
                self._ask(client)

        positions = min(len(self._prompt) + self._tokens, window)
        job: Job[Work] = Job(
            LaneKey(self._served.name, "generate", steps),
            Generation(wish, self._served.codec, deliver),
            (len(self._prompt),),
            positions,
        )
        self._jobs[client] = job
        self._engine.submit(job)
