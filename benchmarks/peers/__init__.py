"""Other servers with the same model, side by side with ours."""
