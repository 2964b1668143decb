"""From a training run to a bundle: trace one evaluation, stitch graphs, verify, measure, pack."""
