"""A daemon that keeps a model warm, and the client that hands a command over to it."""
