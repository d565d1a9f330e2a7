"""Floor 3: who performs what the engine asks for. One driver is synchronous; the asynchronous one will stand beside it."""
