"""The stories: build, edit, ask, verify - each a short straight line over an engine and a store."""
