"""Adapters that ship with tensorcas-mlflow: one package per framework, reached by entry point.

Each package exports its adapter, and imports its framework only inside functions. Beside the packages lies the code
that they share: pickles without arrays (`_pickling`), the tree of a pickle (`_pickle_tree`), and facts of objects
(`_facts`), from which a live object is filled without reading a stored pickle.
"""
