"""What is measured on a machine with a GPU; `python -m benchmarks.gpu` does all of it."""
