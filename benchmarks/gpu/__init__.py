"""Scripts that need a GPU; without one they say so and end with status 3."""
