"""From a training run to a bundle: trace one evaluation, stitch rungs, verify, calibrate, pack.

Uses train for the model and serve.bundle and serve.runtime to verify in the runtime that serves.
"""
