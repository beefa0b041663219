"""Adapters that ship with tensorcas-mlflow, one module per framework; none is imported before its framework is used."""
