"""Load tests over HTTP, for any server with the same public contract."""
