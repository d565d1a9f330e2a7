"""Floor 2: what to do next, as a conversation. The engine asks for effects; it touches no disk, no clock and no user code."""
