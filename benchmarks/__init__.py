"""Measurements: the scripts behind every published figure. See RESULTS.md for what they found."""
