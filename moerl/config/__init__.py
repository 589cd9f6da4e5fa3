"""A run's settings: schema, loading, validation. Imports no torch."""
