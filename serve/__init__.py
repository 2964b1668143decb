"""Serving: bundles, their runtime, the scheduler, the engine, the HTTP contract; never torch."""
