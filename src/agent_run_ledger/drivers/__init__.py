"""Floor 3: who performs what the engine asks for: one driver in the calling thread, one in an event loop."""
