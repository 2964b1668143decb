"""Requests' inputs, read and checked into what a model takes: texts, pictures, points."""
