"""The routes: from a request to a job, and from the engine's events to an answer."""
