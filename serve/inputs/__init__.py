"""Request inputs, read and checked into what a model takes: texts, images, points."""
