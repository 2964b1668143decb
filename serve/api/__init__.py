"""The HTTP contract: one file a dialect, over one way to submit work to the engine."""
