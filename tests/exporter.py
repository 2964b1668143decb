"""Imported, it has loaded what every export needs: for a process that others are forked from."""

from export.pieces import load_exporter

load_exporter()
