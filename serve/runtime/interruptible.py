"""A session of onnxruntime whose runs can be ended from another thread, through their options.

All sessions of a model share the options, so one switch ends whatever runs. Knows nothing of what
is run, nor of when it has taken too long.
"""

from functools import partial
from typing import final

import onnxruntime as ort


def shared_options() -> ort.RunOptions:
    """Options for all sessions of a model, as they are while nothing is to end."""
    options = ort.RunOptions()
    # No graph of a GPU is captured, which is so anyway. Unsaid, every run looks for it and throws:
    # that takes a third as long as one step of a small model.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


@final
class InterruptibleSession:
    """What is used of a session; every run takes the options along."""

    def __init__(
        self, session: ort.InferenceSession, options: ort.RunOptions, lent: object = None
    ) -> None:
        """`lent` is what the session uses where it is; it lives as long as the session."""
        self._lent = lent
        self.get_inputs = session.get_inputs
        self.get_outputs = session.get_outputs
        self.get_session_options = session.get_session_options
        self.io_binding = session.io_binding
        self.run = partial(session.run, run_options=options)
        self.run_with_iobinding = partial(session.run_with_iobinding, run_options=options)
