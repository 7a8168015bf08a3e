"""Output on the console: progress for people and events for programs."""
