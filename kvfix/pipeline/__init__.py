"""The stories: build, edit, sync, refresh, ask, verify - each a short straight line over an engine and a store."""
