"""What goes over the wire: bodies read, answers written, and the bridge to the engine."""
