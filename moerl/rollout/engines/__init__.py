"""Engines of other projects behind moerl's own server, whichever it is. Everything here runs in the engine's environment."""
