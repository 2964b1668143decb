"""Load tests over HTTP. Knows the public contract of the server and nothing of its code."""
