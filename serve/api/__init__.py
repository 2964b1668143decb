"""The HTTP API: one file per protocol, over one way to submit work to the engine."""
