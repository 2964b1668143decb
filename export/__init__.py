"""From a training run to a bundle: trace one evaluation, stitch rungs, verify, calibrate, pack."""
