"""The processes of a run as a whole."""
