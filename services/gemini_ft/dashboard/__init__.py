"""The dashboard: a service of its own, which knows nothing but the public API."""
