"""Integration: everything that knows MLflow."""
