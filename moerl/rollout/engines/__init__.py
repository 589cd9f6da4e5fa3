"""vLLM and SGLang behind moerl's own server: what both share. Everything here runs in the engine's environment."""
